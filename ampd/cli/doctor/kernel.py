"""Checks of the kernel: load, memory of the KV store, /dev/shm, huge pages, inotify, open files, locked memory."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from ampd.cli.doctor.finding import Finding, Verdict
from ampd.cli.serve.checks import WATCHES_PER_PROCESS, used_watches, watch_limit
from ampd.types import GIB
from workers.kv.store_memory import MINIMUM_BYTES, available_bytes, default_size_bytes, free_huge_bytes

_SMALLEST_SHM_BYTES = 128 << 20
"""Docker's default of 64 MiB is too small for the queues between SGLang's processes, and for NCCL."""
_GOOD_SHM_BYTES = 1 << 30
_SMALLEST_GRAPH = 4
"""Processes of a graph: frontend, coordinator, prefill worker, decode worker."""
_GOOD_GRAPH = 16
_MANY_FILES = 4096
_BUSY_SHARE = 0.5
_CPU_MAX, _CPU_QUOTA = Path("sys/fs/cgroup/cpu.max"), Path("sys/fs/cgroup/cpu/cpu.cfs_quota_us")
"""A container's own limit, in the two versions of cgroups."""


@dataclass(frozen=True, slots=True)
class LoadReading:
    """The cores of this machine, and its load before the examination.

    Attributes:
        processes: of the whole machine that ran or waited for a core in the last minute, on average.
        cores: that this process may run on.
        limit_cores: how many of them a container may keep busy; None: all.
    """

    processes: float
    cores: int
    limit_cores: float | None = None


def read_load(root: Path = Path("/")) -> LoadReading:
    """Before anything else is started."""
    return LoadReading(os.getloadavg()[0], len(os.sched_getaffinity(0)), _limit_cores(root))


def _limit_cores(root: Path) -> float | None:
    if (root / _CPU_MAX).exists():
        quota, period = (root / _CPU_MAX).read_text().split()
    elif (root / _CPU_QUOTA).exists():
        quota = (root / _CPU_QUOTA).read_text().strip()
        period = (root / _CPU_QUOTA).with_name("cpu.cfs_period_us").read_text()
    else:
        return None
    return int(quota) / int(period) if quota.isdigit() else None


def judge_load(reading: LoadReading) -> list[Finding]:
    """Whether other programs or a container's limit take the cores, so that all times of the report are too long."""
    found = f"{reading.processes:.1f} on {reading.cores} cores"
    if reading.processes > _BUSY_SHARE * reading.cores:
        found += ": other programs run, so the times below are too long"
        return [Finding("load", Verdict.SLOW, found, "end them, and run it again")]
    if reading.limit_cores is None or reading.limit_cores >= reading.cores:
        return [Finding("load", Verdict.OK, found)]
    found += f", of which this container may use {reading.limit_cores:g}"
    if reading.limit_cores >= _SMALLEST_GRAPH:
        return [Finding("load", Verdict.OK, found)]
    fix = "give it no limit of CPU time (limits.cpu, docker run --cpus): a limit stops its processes at each burst"
    return [Finding("load", Verdict.SLOW, found, fix)]


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Host memory in bytes.

    Attributes:
        available: what the kernel and the cgroups leave.
        store: default size of the KV store of each of two workers.
        shm: size of /dev/shm; None: there is none.
    """

    available: int
    store: int
    shm: int | None


def read_memory() -> MemoryReading:
    """Of this machine, or of the container."""
    shm = Path("/dev/shm")
    status = os.statvfs(shm) if shm.is_dir() else None
    size = status.f_frsize * status.f_blocks if status else None
    return MemoryReading(available_bytes(), default_size_bytes(workers_here=2), size)


def judge_memory(reading: MemoryReading, gpu_bytes: int) -> list[Finding]:
    """Whether the store that the workers would make is there, and larger than the GPUs' memory, which caches it.

    Args:
        gpu_bytes: memory of all GPUs; 0: no GPU.
    """
    found = f"{_gib(reading.available)} available; KV store {_gib(reading.store)} for each of two workers"
    fix = "free memory, raise the container's limit, or set --kv-store-gib"
    if reading.available < 2 * MINIMUM_BYTES:
        memory = Finding("memory", Verdict.WRONG, found, fix)
    elif gpu_bytes and 2 * reading.store < gpu_bytes:
        found += f"; the GPUs have {_gib(gpu_bytes)}, and their KV memory is only a cache of the store"
        memory = Finding("memory", Verdict.SLOW, found, f"{fix}: sessions that do not fit are computed again")
    else:
        memory = Finding("memory", Verdict.OK, found)
    return [memory, _shm(reading.shm)]


def _shm(size: int | None) -> Finding:
    fix = "docker run --shm-size 4g, or sharedMemorySize in the manifest; SGLang's processes and NCCL use it"
    if size is None:
        return Finding("/dev/shm", Verdict.WRONG, "there is none", fix)
    found = f"{_gib(size)} (the KV store is outside of it)"
    if size >= _GOOD_SHM_BYTES:
        return Finding("/dev/shm", Verdict.OK, found)
    return Finding("/dev/shm", Verdict.WRONG if size < _SMALLEST_SHM_BYTES else Verdict.SLOW, found, fix)


@dataclass(frozen=True, slots=True)
class HugePagesReading:
    """Huge pages for the KV store.

    Attributes:
        pool_bytes: what the machine's pool has left for this process.
        store: bytes of one worker's store.
        transparent: the kernel's setting for shared memory, as in `always [never] advise`; empty: it has none.
    """

    pool_bytes: int
    store: int
    transparent: str


TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def read_huge_pages() -> HugePagesReading:
    """The pool, and the setting for shared memory."""
    text = TRANSPARENT.read_text().strip() if TRANSPARENT.exists() else ""
    return HugePagesReading(free_huge_bytes()[0], default_size_bytes(workers_here=2), text)


def judge_huge_pages(reading: HugePagesReading) -> list[Finding]:
    """Whether the store gets huge pages, with which registering and copying it are faster."""
    name = "huge pages"
    if reading.pool_bytes >= reading.store:
        return [Finding(name, Verdict.OK, f"{_gib(reading.pool_bytes)} in the machine's pool")]
    chosen = reading.transparent.partition("[")[2].partition("]")[0]
    if chosen not in ("", "never", "deny"):
        return [Finding(name, Verdict.OK, f"transparent ones for shared memory ({chosen})")]
    found = f"none: the pool has {_gib(reading.pool_bytes)}, transparent ones for shared memory are off"
    fix = f"as root, on the host of a container: echo advise > {TRANSPARENT}"
    return [Finding(name, Verdict.SLOW, found, fix)]


@dataclass(frozen=True, slots=True)
class LimitsReading:
    """Limits of a user and of a process; None: no limit, or the kernel does not tell.

    Attributes:
        inotify_instances, inotify_used: that this user may have, and has.
        inotify_watches: files that this user may watch.
        open_files: of one process.
        locked_bytes: memory that one process may lock.
    """

    inotify_instances: int | None
    inotify_used: int
    inotify_watches: int | None
    open_files: int | None
    locked_bytes: int | None


def read_limits() -> LimitsReading:
    """Of this user and this process, which the processes of a graph inherit."""
    watches = Path("/proc/sys/fs/inotify/max_user_watches")
    return LimitsReading(
        watch_limit(),
        used_watches(),
        int(watches.read_text()) if watches.exists() else None,
        _soft(resource.RLIMIT_NOFILE),
        _soft(resource.RLIMIT_MEMLOCK),
    )


def _soft(kind: int) -> int | None:
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def judge_limits(reading: LimitsReading, *, locks_bytes: int) -> list[Finding]:
    """Whether a graph can start, and serve many clients.

    Args:
        locks_bytes: memory that a worker locks for its GPU or its network card; 0: it locks none.
    """
    return [*_inotify(reading), _open_files(reading.open_files), *_locked(reading.locked_bytes, locks_bytes)]


def _inotify(reading: LimitsReading) -> list[Finding]:
    if reading.inotify_instances is None:
        return [Finding("inotify", Verdict.SKIPPED, "this kernel does not show its limits")]
    limit, used = reading.inotify_instances, reading.inotify_used
    room = max(0, limit - used) // WATCHES_PER_PROCESS
    found = f"{used} of {limit} instances taken: room for {room} processes of a graph"
    fix = f"as root, on the host of a container: sysctl -w fs.inotify.max_user_instances={max(1024, 2 * limit)}"
    if reading.inotify_watches is not None and reading.inotify_watches < WATCHES_PER_PROCESS * _GOOD_GRAPH:
        found += f"; only {reading.inotify_watches} watches"
        fix = "as root, on the host of a container: sysctl -w fs.inotify.max_user_watches=65536"
        return [Finding("inotify", Verdict.WRONG, found, fix)]
    verdict = Verdict.WRONG if room < _SMALLEST_GRAPH else Verdict.SLOW if room < _GOOD_GRAPH else Verdict.OK
    return [Finding("inotify", verdict, found, "" if verdict is Verdict.OK else fix)]


def _open_files(limit: int | None) -> Finding:
    if limit is None or limit >= _MANY_FILES:
        return Finding("open files", Verdict.OK, f"{limit or 'any number'} per process")
    found = f"{limit} per process: a round takes a connection in several processes"
    return Finding("open files", Verdict.SLOW, found, "ulimit -n 65536, or LimitNOFILE= of the service")


def _locked(limit: int | None, locks_bytes: int) -> list[Finding]:
    if not locks_bytes or limit is None or limit >= locks_bytes:
        return []
    found = f"{_gib(limit)} per process: a KV store of {_gib(locks_bytes)} may not be pinned or registered"
    fix = "ulimit -l unlimited, or LimitMEMLOCK=infinity in containerd's unit"
    return [Finding("locked memory", Verdict.SLOW, found, fix)]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.0f} MiB"
