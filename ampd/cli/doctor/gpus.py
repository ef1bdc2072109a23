"""Checks of the GPUs and their driver."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from ampd.cli.doctor.finding import Finding, Verdict

_QUERY = (
    *("index", "name", "memory.total", "memory.used", "driver_version"),
    *("pcie.link.width.current", "pcie.link.width.max", "ecc.errors.uncorrected.volatile.total"),
)
_BUSY_SHARE = 0.05
_TIMEOUT_S = 60.0
_TORCH = """
import json, torch
names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "names": names}))
"""


_MOST_DIGITS = 12


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU. Sizes in MiB, as the driver gives them; None: the driver does not know."""

    index: int
    name: str
    memory_mib: int
    used_mib: int
    driver: str
    link_width: int | None
    link_width_max: int | None
    memory_errors: int | None


@dataclass(frozen=True, slots=True)
class GpusReading:
    """All GPUs of the machine.

    Attributes:
        problem: why they could not be read; empty: they could.
        torch_cuda: CUDA's version that PyTorch is built for; None: without CUDA, or not asked.
        torch_names: the GPUs that PyTorch can use; None: not asked.
    """

    gpus: tuple[GpuReading, ...] = ()
    problem: str = ""
    torch_cuda: str | None = None
    torch_names: tuple[str, ...] | None = None


def read_gpus(*, asks_torch: bool) -> GpusReading:
    """The GPUs that `nvidia-smi` lists, and those that PyTorch can use.

    Args:
        asks_torch: PyTorch is installed. It is asked in another process, because it takes seconds and memory.
    """
    if shutil.which("nvidia-smi") is None:
        return GpusReading()
    listing = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if listing.returncode != 0:
        return GpusReading(problem=" ".join((listing.stdout or listing.stderr).split())[:300] or "nvidia-smi failed")
    try:
        gpus = parsed(listing.stdout)
    except (ValueError, csv.Error):
        return GpusReading(problem="nvidia-smi lists them in an unknown form")
    if not (gpus and asks_torch):
        return GpusReading(gpus)
    asked = subprocess.run(
        [sys.executable, "-c", _TORCH], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    if asked.returncode != 0:
        last = asked.stderr.strip().splitlines()[-1:] or ["no output"]
        return GpusReading(gpus, problem=f"PyTorch cannot use them: {last[0][:300]}", torch_names=())
    return of_torch(gpus, asked.stdout)


def of_torch(gpus: tuple[GpuReading, ...], answer: str) -> GpusReading:
    """What PyTorch's process printed. Libraries may print there too."""
    try:
        match json.loads(answer):
            case {"cuda": str() | None as cuda, "names": list(names)}:
                return GpusReading(gpus, torch_cuda=cuda, torch_names=tuple(map(str, names)))
    except (ValueError, RecursionError):
        pass
    return GpusReading(gpus, problem="PyTorch's answer cannot be read", torch_names=())


def parsed(listing: str) -> tuple[GpuReading, ...]:
    """The rows of `nvidia-smi`. A field that the GPU does not have is text such as `[N/A]`.

    Raises:
        ValueError, csv.Error: they are other rows.
    """
    rows = csv.reader(StringIO(listing), skipinitialspace=True)
    return tuple(
        GpuReading(
            _index(index), name, _number(total) or 0, _number(used) or 0, driver,
            *(_number(field) for field in (width, width_max, errors)),
        )
        for index, name, total, used, driver, width, width_max, errors in (row for row in rows if row)
    )  # fmt: skip


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() and len(text) <= _MOST_DIGITS else None


def _index(text: str) -> int:
    if (index := _number(text)) is None:
        raise ValueError("a GPU without an index")
    return index


def judge_gpus(reading: GpusReading, tp: int) -> list[Finding]:
    """Whether there are GPUs, PyTorch can use them, and they are free and well connected.

    Args:
        tp: GPUs per worker.
    """
    if reading.problem:
        fix = "compare the driver's version with the one that PyTorch's CUDA needs; in a container give it the GPUs"
        return [Finding("GPUs", Verdict.WRONG, reading.problem, fix)]
    if not reading.gpus:
        found = "no NVIDIA GPU (nvidia-smi is not there or lists none); engines compute on the CPU, to try things"
        return [Finding("GPUs", Verdict.SKIPPED, found)]
    return [_whether_usable(reading, tp), *_each(reading.gpus)]


def _whether_usable(reading: GpusReading, tp: int) -> Finding:
    names = sorted({gpu.name for gpu in reading.gpus})
    found = f"{len(reading.gpus)} x {' and '.join(names)}, driver {reading.gpus[0].driver}"
    if reading.torch_names is not None:
        found += f", PyTorch for CUDA {reading.torch_cuda} uses {len(reading.torch_names)}"
        if not reading.torch_names:
            fix = "install a driver for that version of CUDA, or look at CUDA_VISIBLE_DEVICES"
            return Finding("GPUs", Verdict.WRONG, found, fix)
    usable = len(reading.gpus) if reading.torch_names is None else len(reading.torch_names)
    if usable < tp:
        return Finding("GPUs", Verdict.WRONG, f"{found}; --tp is {tp}", "use a smaller --tp, or give it more GPUs")
    return Finding("GPUs", Verdict.OK, found)


def _each(gpus: Sequence[GpuReading]) -> list[Finding]:
    findings = []
    if errors := [gpu for gpu in gpus if gpu.memory_errors]:
        found = ", ".join(f"GPU {gpu.index}: {gpu.memory_errors}" for gpu in errors)
        fix = "take the GPU out of service: its memory loses data"
        findings.append(Finding("GPU memory errors", Verdict.WRONG, f"uncorrected: {found}", fix))
    if busy := [gpu for gpu in gpus if gpu.used_mib > _BUSY_SHARE * gpu.memory_mib]:
        found = ", ".join(f"GPU {gpu.index}: {gpu.used_mib} of {gpu.memory_mib} MiB" for gpu in busy)
        fix = "end the other programs on them (nvidia-smi lists these), or leave them out by CUDA_VISIBLE_DEVICES"
        findings.append(Finding("GPU memory", Verdict.SLOW, f"taken by others: {found}", fix))
    if narrow := [gpu for gpu in gpus if gpu.link_width and gpu.link_width < (gpu.link_width_max or 0)]:
        found = ", ".join(f"GPU {gpu.index}: {gpu.link_width} of {gpu.link_width_max} lanes" for gpu in narrow)
        fix = "move the card to a slot with all lanes: KV is stored and loaded over it"
        findings.append(Finding("GPU slot", Verdict.SLOW, found, fix))
    return findings
