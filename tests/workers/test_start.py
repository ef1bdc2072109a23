"""Starts that cannot be: one line, and the exit code that fits."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampd.errors import UserError
from ampd.perf.piecewise import load_performance_model
from ampd.state.embedded import EmbeddedRedis
from ampd.tiny_model import tiny_model_path
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
        (
            ["--role", "prefill", "--state-url", "unix:///nowhere/redis.sock"],
            2,
            "--state-url: shared state unix:///nowhere",
        ),
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--engine", "modelled", "--model", "{empty}/none"], "--model: no folder at"),
        (["--engine", "sglang", "--model", "{empty}/none"], "--model: no folder at"),
        (["--engine", "sglang", "--model", "{no_weights}"], "has no weights"),
        (["--engine", "sglang", "--model", "{model}", "--tp", "2"], "use --tp 1"),
    ],
)
def test_the_model_and_the_degree_come_before_discovery_and_redis(
    model_folder: Path, tmp_path: Path, flags: list[str], words: str
) -> None:
    no_weights = tmp_path / "no-weights"
    no_weights.mkdir()
    for file in model_folder.iterdir():
        if file.suffix != ".safetensors":
            (no_weights / file.name).symlink_to(file)
    discovery = tmp_path / "discovery"
    given = [flag.format(empty=tmp_path, no_weights=no_weights, model=tiny_model_path()) for flag in flags]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dynamo_environment(discovery).items():
            patch.setenv(name, value)
        done = run_worker(["--role", "prefill", "--state-url", "unix:///nowhere/redis.sock", *given])
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1), done.stderr
    assert words in done.stderr
    assert not discovery.exists()


def test_wrong_settings_object_is_refused(model_folder: Path) -> None:
    settings = WorkerSettings(role="prefill", engine="modelled", model=model_folder)
    with pytest.raises(UserError):
        create_engine(settings, load_performance_model("tiny-cpu"))


@pytest.mark.parametrize("engine", ["modelled", "sglang"])
def test_help_describes_every_flag(engine: str) -> None:
    done = run_worker(["--engine", engine, "--help"])
    assert done.returncode == 0, done.stderr
    assert "--kv-timeout-s" in done.stdout
    assert "--page-size" in done.stdout
    assert ("--time-scale" in done.stdout) == (engine == "modelled")
