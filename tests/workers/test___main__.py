"""Starts that cannot be: one line, and the exit code that fits."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from ampd.cli.serve.graph import dynamo_environment
from ampd.errors import UserError
from ampd.perf.corrections import CorrectedModel
from ampd.perf.presets import load_performance_model
from ampd.state.embedded import EmbeddedRedis
from ampd.tiny_model import tiny_model_path
from ampd.types import Parallelism
from tests.harness.fork_server import ForkServer
from workers.__main__ import main
from workers.engines import create_engine
from workers.settings import WorkerSettings


class Ended(NamedTuple):
    """How a process ended: its exit code and what it wrote."""

    code: int
    output: str


@dataclass
class Start:
    """Starts `python -m workers` where Dynamo's discovery is a folder."""

    server: ForkServer
    folder: Path

    @property
    def discovery(self) -> Path:
        return self.folder / "discovery"

    def __call__(self, flags: list[str]) -> Ended:
        log = self.folder / "worker.log"
        environment = {**os.environ, **dynamo_environment(self.discovery), "DYN_LOG": "warn"}
        code = self.server.start([sys.executable, "-m", "workers", *flags], environment, log).wait(60)
        return Ended(code, log.read_text())


@pytest.fixture
def start(fork_server: ForkServer, tmp_path: Path) -> Start:
    return Start(fork_server, tmp_path)


@pytest.mark.slow
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
    start: Start,
    redis_server: EmbeddedRedis,
    model_folder: Path,
    tmp_path: Path,
    flags: list[str],
    code: int,
    words: str,
) -> None:
    given = [flag.format(empty=tmp_path) for flag in flags]
    base = ["--engine", "modelled", "--model", str(model_folder), "--state-url", redis_server.url]
    ended = start([*base, "--perf", "tiny-cpu", *given])
    lines = ended.output.strip().splitlines()
    assert (ended.code, len(lines)) == (code, 1), ended.output
    assert words in lines[0]


@pytest.mark.slow
def test_a_worker_whose_times_are_not_known_is_refused(start: Start, model_folder: Path) -> None:
    ended = start(["--role", "prefill", "--engine", "modelled", "--model", str(model_folder)])
    (line,) = ended.output.strip().splitlines()
    assert (ended.code, "--perf is missing" in line) == (2, True), line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--engine", "modelled", "--model", "{empty}/none"], "--model: no folder at"),
        (["--engine", "sglang", "--model", "{empty}/none"], "--model: no folder at"),
        (["--engine", "sglang", "--model", "{no_weights}"], "has no weights"),
        (["--engine", "sglang", "--model", "{model}", "--tp", "8"], "--tp 8 does not fit the model's"),
        (["--engine", "sglang", "--model", "{model}", "--tp", "2", "--device", "cpu"], "--tp 2 needs GPUs"),
    ],
)
def test_the_model_and_the_degree_come_before_discovery_and_redis(
    start: Start, model_folder: Path, tmp_path: Path, flags: list[str], words: str
) -> None:
    no_weights = tmp_path / "no-weights"
    no_weights.mkdir()
    for file in model_folder.iterdir():
        if file.suffix != ".safetensors":
            (no_weights / file.name).symlink_to(file)
    given = [flag.format(empty=tmp_path, no_weights=no_weights, model=tiny_model_path()) for flag in flags]
    ended = start(["--role", "prefill", "--state-url", "unix:///nowhere/redis.sock", *given])
    assert (ended.code, len(ended.output.strip().splitlines())) == (2, 1), ended.output
    assert words in ended.output
    assert not start.discovery.exists()


def test_a_worker_that_anybody_may_call_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    monkeypatch.delenv("AMPD_GRAPH_SECRET_FILE", raising=False)
    monkeypatch.delenv("DYN_TCP_RPC_HOST", raising=False)
    assert main(["--role", "prefill", "--engine", "modelled", "--model", str(model_folder)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--graph-secret-file is missing" in line
    assert "without DYN_TCP_RPC_HOST it is not" in line


def test_wrong_settings_object_is_refused(model_folder: Path) -> None:
    settings = WorkerSettings(role="prefill", engine="modelled", model=model_folder)
    with pytest.raises(UserError):
        create_engine(settings, CorrectedModel(load_performance_model("tiny-cpu"), Parallelism()))


@pytest.mark.parametrize("engine", ["modelled", "sglang"])
def test_help_describes_every_flag(start: Start, engine: str) -> None:
    ended = start(["--engine", engine, "--help"])
    assert ended.code == 0, ended.output
    for flag in ("--kv-timeout-s", "--page-size"):
        assert flag in ended.output
    assert ("--time-scale" in ended.output) == (engine == "modelled")
