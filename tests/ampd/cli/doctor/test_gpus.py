"""GPUs as `nvidia-smi` lists them, on machines that are not this one."""

from dataclasses import replace

import pytest

from ampd.cli.doctor.finding import Verdict
from ampd.cli.doctor.gpus import GpuReading, GpusReading, judge_gpus, parsed

LISTING = """\
0, NVIDIA H200, 143771, 4, 580.95.05, 16, 16, 0
1, NVIDIA H200, 143771, 90211, 580.95.05, 8, 16, [N/A]
"""
FREE = GpuReading(0, "NVIDIA H200", 143771, 4, "580.95.05", 16, 16, 0)
TWO = GpusReading((FREE, replace(FREE, index=1)), torch_cuda="13.0", torch_names=("NVIDIA H200",) * 2)


def test_a_listing_is_read() -> None:
    first, second = parsed(LISTING)
    assert first == FREE
    assert second == GpuReading(1, "NVIDIA H200", 143771, 90211, "580.95.05", 8, 16, None)


def test_free_gpus_are_ok() -> None:
    (finding,) = judge_gpus(TWO, tp=2)
    assert finding.verdict is Verdict.OK
    assert finding.found == "2 x NVIDIA H200, driver 580.95.05, PyTorch for CUDA 13.0 uses 2"


def test_a_machine_without_gpus_is_no_fault() -> None:
    assert [finding.verdict for finding in judge_gpus(GpusReading(), tp=1)] == [Verdict.SKIPPED]


@pytest.mark.parametrize(
    ("reading", "tp"),
    [
        (GpusReading(problem="Failed to initialize NVML: Driver/library version mismatch"), 1),
        (replace(TWO, torch_names=()), 1),
        (replace(TWO, torch_names=("NVIDIA H200",)), 2),
        (TWO, 4),
    ],
)
def test_gpus_that_cannot_be_used_are_wrong(reading: GpusReading, tp: int) -> None:
    finding = judge_gpus(reading, tp)[0]
    assert finding.verdict is Verdict.WRONG
    assert finding.fix


def test_each_gpu_is_looked_at() -> None:
    bad = replace(FREE, index=1, used_mib=90211, link_width=8, memory_errors=3)
    findings = {finding.check: finding for finding in judge_gpus(GpusReading((FREE, bad)), tp=1)}
    assert findings["GPU memory errors"].verdict is Verdict.WRONG
    assert findings["GPU memory"].found == "taken by others: GPU 1: 90211 of 143771 MiB"
    assert findings["GPU slot"].found == "GPU 1: 8 of 16 lanes"
