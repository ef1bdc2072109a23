"""The memory of a KV store: one segment of host memory that the worker and every rank of its engine map."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Iterator
from ctypes import addressof, c_char
from pathlib import Path

from ampd.types import GIB

log = logging.getLogger(__name__)

MINIMUM_BYTES = 256 << 20
"""The default size is never below this."""
_ROOT = Path("/")


class StoreMemory:
    """Anonymous shared memory. It disappears when the last process that maps it has ended, however they end.

    The worker creates it. The ranks open it by the worker's process id and file descriptor. It is sparse: what was
    never written takes no memory.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self.size_bytes = size_bytes
        try:
            self.map = mmap.mmap(fd, size_bytes)
        except OSError:
            os.close(fd)
            raise
        try:
            self.map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.debug("KV store: no transparent huge pages: %s", error)

    @classmethod
    def create(cls, size_bytes: int) -> StoreMemory:
        """Make the memory.

        Raises:
            OSError: the machine does not have this much memory available.
        """
        available = available_bytes()
        if size_bytes > available:
            raise OSError(
                errno.ENOMEM,
                f"a KV store of {size_bytes / GIB:.1f} GiB does not fit: {available / GIB:.1f} GiB of memory are "
                "available here; make the store smaller",
            )
        fd = os.memfd_create("ampd-kv-store", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        log.info("KV store: %.1f GiB of host memory, %s", size_bytes / GIB, _kind_of_shared_pages())
        return cls(fd, size_bytes)

    @classmethod
    def open(cls, process_id: int, fd: int, size_bytes: int) -> StoreMemory:
        """Map the memory of another process. Raises `OSError` if that process has ended."""
        return cls(os.open(f"/proc/{process_id}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), size_bytes)

    @property
    def place(self) -> tuple[int, int, int]:
        """Process id, file descriptor and size in bytes, for `open` elsewhere."""
        return os.getpid(), self._fd, self.size_bytes

    @property
    def address(self) -> int:
        """Where the memory starts in this process."""
        return addressof(c_char.from_buffer(self.map))

    def close(self) -> None:
        """Unmap. Views that are still alive keep the mapping until they go."""
        try:
            self.map.close()
        except BufferError:
            return
        finally:
            os.close(self._fd)


def default_size_bytes(workers_here: int, root: Path = _ROOT) -> int:
    """The store's size where none is given: a worker's share of half of the memory that is available.

    Args:
        workers_here: workers that share this machine and start at about the same time.
        root: of the file system with /proc and /sys.
    """
    return max(MINIMUM_BYTES, available_bytes(root) // 2 // workers_here)


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that can still be used: what the kernel has, or what the cgroups leave, whichever is less."""
    kernel_bytes = _numbers(root / "proc/meminfo")["MemAvailable:"] * 1024
    return min([kernel_bytes, *_left_by_cgroups(root)])


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """Bytes that each limit on this process leaves, of both versions of cgroups, from its group to the root.

    A group's file cache counts as left, because the kernel drops it when memory is needed.
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tree, limit, usage, cache = "sys/fs/cgroup", "max", "current", "inactive_file"
        elif "memory" in controllers.split(","):
            tree, limit = "sys/fs/cgroup/memory", "limit_in_bytes"
            usage, cache = "usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = Path(path.lstrip("/"))
        for place in [root / tree / folder for folder in (group, *group.parents)]:
            limit_file = place / f"memory.{limit}"
            # A container has its own group at the root of the tree, and nothing at the path that the kernel names.
            most = limit_file.read_text().strip() if limit_file.exists() else "max"
            if most != "max":
                used = int((place / f"memory.{usage}").read_text())
                yield max(0, int(most) - used + _numbers(place / "memory.stat").get(cache, 0))


def _numbers(path: Path) -> dict[str, int]:
    """Lines of the kind "name number ..." in a file of the kernel; nothing if there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1}


def _kind_of_shared_pages() -> str:
    """The pages that the kernel gives to shared memory whose user asks for huge ones."""
    setting = _ROOT / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    text = setting.read_text() if setting.exists() else "[never]"
    if "[never]" in text or "[deny]" in text:
        return f"small pages, because {setting} turns huge ones off"
    return "transparent huge pages"
