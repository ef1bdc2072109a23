"""Starts that cannot be: one line, and the exit code that fits."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampd.errors import UserError
from ampd.perf.piecewise import load_performance_model
from ampd.state.embedded import EmbeddedRedis
from tests.workers.live_lab import dynamo_environment
from workers.engines import create_engine
from workers.settings import WorkerSettings


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, EmbeddedRedis() as redis:
        for name, value in dynamo_environment(tmp_path_factory.mktemp("discovery")).items():
            patch.setenv(name, value)
        yield redis.url


def run_worker(flags: list[str], program: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(program or ["-m", "workers"]), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--role", "prefill", "--ordering", "nonsense"], 2, "unknown ordering policy 'nonsense'; known:"),
        (["--role", "prefill", "--ordering", "ampd(windows=5)"], 2, "ordering policy ampd has no parameter 'windows'"),
        (["--role", "chef"], 2, "--role"),
        (["--role", "prefill", "--perf", "nonsense"], 2, "no performance model 'nonsense'"),
        (["--role", "prefill", "--tp", "64"], 2, "no times for tp 64"),
        (["--role", "prefill", "--engine", "steam"], 2, "--engine"),
        (["--role", "prefill", "--model", "{empty}"], 2, "config.json"),
        (["--role", "prefill", "--kv-timeout-s", "0"], 2, "--kv-timeout-s"),
        (["--role", "prefill", "--state-url", "unix:///nowhere/redis.sock"], 1, "/nowhere/redis.sock"),
        (["--role", "prefill", "--state-url", "http://x"], 2, "state URL"),
    ],
)
def test_a_start_that_cannot_be_says_so_in_one_line(
    redis_url: str, model_folder: Path, tmp_path: Path, flags: list[str], code: int, words: str
) -> None:
    given = [flag.format(empty=tmp_path) for flag in flags]
    base = ["--engine", "modelled", "--model", str(model_folder), "--state-url", redis_url]
    done = run_worker([*base, *given])
    lines = done.stderr.strip().splitlines()
    assert (done.returncode, len(lines)) == (code, 1), done.stderr
    assert words in lines[0]


def test_wrong_settings_object_is_refused(model_folder: Path) -> None:
    settings = WorkerSettings(role="prefill", engine="modelled", model=model_folder)
    with pytest.raises(UserError):
        create_engine(settings, load_performance_model("tiny-cpu"))


@pytest.mark.parametrize("engine", ["modelled", "sglang"])
def test_help_describes_every_flag(engine: str) -> None:
    done = run_worker(["--engine", engine, "--help"])
    assert done.returncode == 0, done.stderr
    assert "--prefill-concurrency" in done.stdout
    assert "--page-size" in done.stdout
    assert ("--time-scale" in done.stdout) == (engine == "modelled")
