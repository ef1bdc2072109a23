"""`ampd doctor` as a command."""

import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ampd.cli import doctor
from ampd.cli.doctor import Finding
from ampd.cli.main import main
from tests.ampd.perf.config_lab import write_config
from tests.harness.gpus import machine_with
from tests.harness.tcp_redis import TcpRedis

MODELLED = ("doctor", "--engine", "modelled")
needs_engines = pytest.mark.skipif(not (find_spec("sglang") and find_spec("nixl")), reason="SGLang is not installed")


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without weights."""
    folder = write_config(tmp_path / "mine", {})
    (folder / "tokenizer.json").touch()
    return folder


def _findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = main([*arguments, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    findings = {finding["check"]: finding for finding in document["findings"]}
    is_wrong = "wrong" in (finding["verdict"] for finding in findings.values())
    assert (code, document["verdict"] == "wrong") == (int(is_wrong), is_wrong)
    return code, findings


def _verdicts(findings: dict[str, dict[str, str]]) -> dict[str, str]:
    """Without inotify instances, which other graphs may hold."""
    return {name: finding["verdict"] for name, finding in findings.items() if name != "inotify"}


def test_a_graph_of_modelled_engines_needs_no_device(
    capsys: pytest.CaptureFixture[str], redis_server: TcpRedis
) -> None:
    _, findings = _findings(capsys, *MODELLED, "--state-url", redis_server.tcp_url)
    assert _verdicts(findings) == dict.fromkeys(("software", "Redis", "model", "performance model"), "ok")
    assert redis_server.tcp_url in findings["Redis"]["found"]


@needs_engines
def test_engines_need_memory_and_the_tiny_model_runs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = _verdicts(_findings(capsys, "doctor")[1])
    assert verdicts.pop("locked memory") in ("skipped", "ok", "warning")
    assert verdicts.pop("GPUs") == "skipped"
    assert verdicts == dict.fromkeys(("software", "memory", "/dev/shm", "Redis", "model", "performance model"), "ok")


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    main(MODELLED)
    assert "ok       software           CPython" in capsys.readouterr().out


@needs_engines
def test_gpus_and_their_memory_are_judged(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with(monkeypatch, tmp_path, "NVIDIA H200")
    monkeypatch.setattr(doctor, "torch_gpus", lambda: ("12.8", 1))
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(3 << 20)
    _, findings = _findings(capsys, "doctor", "--model", str(folder))
    assert findings["GPUs"]["verdict"] == "ok"
    assert findings["GPUs"]["found"].startswith("1 x NVIDIA H200, driver 580.95.05, PyTorch for CUDA 12.8 uses 1")
    assert "135.7 GB for weights and KV on each GPU" in findings["model"]["found"]
    assert findings["compiler"]
    assert findings["performance model"]["found"].startswith("mine on NVIDIA H200 SXM, --tp 1: room for KV of ")


@needs_engines
def test_a_driver_that_fails_is_wrong_and_nothing_else_stops(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with(monkeypatch, tmp_path)
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho Driver/library version mismatch\nexit 18\n")
    _, findings = _findings(capsys, "doctor")
    assert findings["GPUs"]["found"] == "nvidia-smi fails: Driver/library version mismatch"
    assert findings["GPUs"]["verdict"] == "wrong"
    assert "driver" in findings["GPUs"]["fix"]
    assert findings["model"]["verdict"] == "ok"


def test_a_redis_that_is_away_is_wrong_and_nothing_else_stops(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = _findings(capsys, *MODELLED, "--state-url", "redis://me:hunter2@127.0.0.1:1/0")
    assert code == 1
    assert _verdicts(findings)["Redis"] == "wrong"
    assert _verdicts(findings)["model"] == "ok"
    assert "hunter2" not in json.dumps(findings)


def test_a_model_that_is_wrong_has_no_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, findings = _findings(capsys, *MODELLED, "--model", str(tmp_path))
    assert code == 1
    assert findings["model"]["found"].endswith("has no config.json")
    assert findings["model"]["fix"] == "give a model folder in Hugging Face layout"
    assert findings["performance model"]["verdict"] == "skipped"


def test_times_that_cannot_be_derived_are_wrong(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    ask = partial(_findings, capsys, *MODELLED, "--model", str(folder))
    code, findings = ask()
    assert code == 1
    assert _verdicts(findings)["performance model"] == "wrong"
    assert "no GPU" in findings["performance model"]["found"]
    assert f"--perf {folder}@h200" in findings["performance model"]["fix"]
    assert _verdicts(ask("--perf", f"{folder}@h200")[1])["performance model"] == "ok"
    assert _verdicts(ask("--perf", "tiny-cpu", "--tp", "8")[1])["performance model"] == "wrong"


def test_too_few_inotify_instances_are_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def inotify(limit: int) -> dict[str, str]:
        (tmp_path / "limit").write_text(str(limit))
        return _findings(capsys, *MODELLED)[1]["inotify"]

    monkeypatch.setattr("ampd.cli.serve.settings._WATCH_LIMIT", tmp_path / "limit")
    assert inotify(100_000)["verdict"] == "ok"
    finding = inotify(27)
    assert finding["verdict"] == "wrong"
    assert finding["found"].startswith("4 processes need about 28 inotify instances")
    assert "sysctl -w fs.inotify.max_user_instances" in finding["fix"]


@pytest.mark.parametrize("arguments", [("--engine", "another"), ("--tp", "0"), ("--perf", "none")])
def test_wrong_calls_end_with_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]) -> None:
    assert main([*MODELLED, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1


def test_a_check_that_fails_itself_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Callable[[], Finding]:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(doctor, "read_model", refuse)
    _, findings = _findings(capsys, *MODELLED)
    assert findings["model"]["found"] == "could not be made: [Errno 13] Permission denied"
    assert findings["model"]["fix"]
    assert findings["Redis"]["verdict"] == "ok"
