"""GPUs, memory and limits of machines that are not this one."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from ampd.cli.doctor import (
    Verdict,
    check_compiler,
    check_software,
    judge_gpus,
    judge_locked_memory,
    judge_memory,
    judge_shared_memory,
    torch_gpus,
)
from ampd.cli.serve.devices import FoundGpu
from ampd.cli.serve.settings import EngineName
from ampd.errors import UserError
from ampd.types import GIB

H200 = FoundGpu(0, "NVIDIA H200", 143771, 4, "580.95.05")
TWO = [H200, replace(H200, index=1)]


@pytest.mark.parametrize(
    ("usable", "tp", "verdict", "fix"),
    [
        (2, 1, Verdict.OK, ""),
        (2, 2, Verdict.OK, ""),
        (1, 2, Verdict.WRONG, "use a smaller --tp"),
        (0, 1, Verdict.WRONG, "install a driver"),
    ],
)
def test_a_worker_needs_gpus_that_pytorch_can_use(usable: int, tp: int, verdict: Verdict, fix: str) -> None:
    finding = judge_gpus(TWO, "13.0", usable, tp)
    assert finding.verdict is verdict
    assert finding.found.startswith(f"2 x NVIDIA H200, driver 580.95.05, PyTorch for CUDA 13.0 uses {usable}")
    assert (finding.fix.startswith(fix), bool(finding.fix)) == (True, bool(fix))


def _interpreter(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Makes a shell script the Python that is asked about its PyTorch."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))


def test_pytorch_is_asked_for_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _interpreter(tmp_path, monkeypatch, "echo a library says hello; echo 12.8 4")
    assert torch_gpus() == ("12.8", 4)
    _interpreter(tmp_path, monkeypatch, "echo 'ImportError: libcuda.so.1: no such file' >&2; exit 1")
    with pytest.raises(UserError, match=r"PyTorch cannot use the GPUs: ImportError: libcuda.so.1: no such file; "):
        torch_gpus()


@pytest.mark.slow
def test_the_question_to_pytorch_is_one_that_it_answers() -> None:
    pytest.importorskip("torch")
    cuda, usable = torch_gpus()
    assert cuda
    assert usable >= 0


def test_engines_need_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = check_software(EngineName.MODELLED)
    assert finding.verdict is Verdict.OK
    assert all(name in finding.found for name in ("CPython 3.", "ampd 0.", "ai-dynamo 1."))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nixl" else object())
    with pytest.raises(UserError, match="needs the package nixl; install it"):
        check_software(EngineName.SGLANG)


def test_a_compiler_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("sysconfig.get_path", lambda _name: "/nowhere")
    with pytest.raises(UserError, match=r"missing: Python's headers, .*; apt install g\+\+ python3-dev"):
        check_compiler()


@pytest.mark.parametrize(("available", "verdict"), [(16 * GIB, Verdict.OK), (GIB // 4, Verdict.WRONG)])
def test_memory(available: int, verdict: Verdict) -> None:
    finding = judge_memory(available, available // 4)
    assert finding.verdict is verdict
    assert bool(finding.fix) is (verdict is not Verdict.OK)


@pytest.mark.parametrize(("mib", "verdict"), [(4096, Verdict.OK), (64, Verdict.WRONG), (0, Verdict.WRONG)])
def test_shared_memory(mib: int, verdict: Verdict) -> None:
    finding = judge_shared_memory(mib << 20)
    assert finding.verdict is verdict
    assert ("--shm-size" in finding.fix) is (verdict is not Verdict.OK)


@pytest.mark.parametrize(
    ("limit", "has_cards", "verdict"),
    [
        (8 << 20, False, Verdict.SKIPPED),
        (8 << 20, True, Verdict.WARNING),
        (GIB, True, Verdict.OK),
        (resource.RLIM_INFINITY, True, Verdict.OK),
    ],
)
def test_memory_that_an_rdma_device_locks(limit: int, has_cards: bool, verdict: Verdict) -> None:
    finding = judge_locked_memory(limit, GIB, has_cards=has_cards)
    assert finding.verdict is verdict
    assert ("ulimit -l" in finding.fix) is (verdict is Verdict.WARNING)
