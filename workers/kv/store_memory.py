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

    The worker creates it. The ranks open it by the worker's process id and file descriptor. It is sparse unless it
    comes from the machine's pool of huge pages: what was never written takes no memory.
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
            # The memory is from the pool of huge pages, or the kernel has no transparent ones.
            log.debug("KV store: no transparent huge pages: %s", error)

    @classmethod
    def create(cls, size_bytes: int) -> StoreMemory:
        """Make the memory, from the machine's pool of huge pages if it has enough; then the size is rounded up.

        Raises:
            OSError: the machine does not have this much memory available.
        """
        memory, kind = _of_huge_pages(size_bytes), "huge pages"
        if memory is None:
            available = available_bytes()
            if size_bytes > available:
                raise OSError(
                    errno.ENOMEM,
                    f"a KV store of {size_bytes / GIB:.1f} GiB does not fit: {available / GIB:.1f} GiB of memory are "
                    "available here; make the store smaller",
                )
            fd = os.memfd_create("ampd-kv-store", os.MFD_CLOEXEC)
            os.ftruncate(fd, size_bytes)
            memory, kind = cls(fd, size_bytes), _kind_of_shared_pages()
        log.info("KV store: %.1f GiB of host memory, %s", memory.size_bytes / GIB, kind)
        return memory

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
    return min([kernel_bytes, *_left_by_cgroups(root, "memory", "memory.{}")])


def free_huge_bytes(root: Path = _ROOT) -> tuple[int, int]:
    """Bytes that the machine's pool of huge pages has left for this process, and bytes per huge page.

    The cgroups count here too: a process that exceeds their limit is killed at the access, not at the mapping.
    """
    memory = _numbers(root / "proc/meminfo")
    page_bytes = memory.get("Hugepagesize:", 0) * 1024
    if not page_bytes:
        return 0, 0
    pages = memory["HugePages_Free:"] - memory["HugePages_Rsvd:"]
    size = f"{page_bytes >> 20}MB" if page_bytes < GIB else f"{page_bytes >> 30}GB"
    return min([pages * page_bytes, *_left_by_cgroups(root, "hugetlb", f"hugetlb.{size}.{{}}")]), page_bytes


def _left_by_cgroups(root: Path, controller: str, names: str) -> Iterator[int]:
    """Bytes that each limit on this process leaves, of both versions of cgroups, from its group to the root.

    A group's file cache counts as left, because the kernel drops it when memory is needed.

    Args:
        names: of the controller's files, with {} for the quantity.
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tree, limit, usage, cache = "sys/fs/cgroup", "max", "current", "inactive_file"
        elif controller in controllers.split(","):
            tree, limit = f"sys/fs/cgroup/{controller}", "limit_in_bytes"
            usage, cache = "usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = Path(path.lstrip("/"))
        for place in [root / tree / folder for folder in (group, *group.parents)]:
            limit_file = place / names.format(limit)
            # A container has its own group at the root of the tree, and nothing at the path that the kernel names.
            most = limit_file.read_text().strip() if limit_file.exists() else "max"
            if most != "max":
                used = int((place / names.format(usage)).read_text())
                yield max(0, int(most) - used + _numbers(place / names.format("stat")).get(cache, 0))


def _numbers(path: Path) -> dict[str, int]:
    """Lines of the kind "name number ..." in a file of the kernel; nothing if there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1}


def _of_huge_pages(size_bytes: int) -> StoreMemory | None:
    """Memory from the machine's pool of huge pages; None if it has too few."""
    free_bytes, page_bytes = free_huge_bytes()
    if free_bytes < size_bytes:
        return None
    rounded_bytes = -(-size_bytes // page_bytes) * page_bytes
    fd = os.memfd_create("ampd-kv-store", os.MFD_CLOEXEC | os.MFD_HUGETLB)
    os.ftruncate(fd, rounded_bytes)
    try:
        # The mapping reserves the pages, so that no later access fails.
        return StoreMemory(fd, rounded_bytes)
    except OSError as error:
        log.debug("KV store: no huge pages: %s", error)
        return None


def _kind_of_shared_pages() -> str:
    """The pages that the kernel gives to shared memory whose user asks for huge ones."""
    setting = _ROOT / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    text = setting.read_text() if setting.exists() else "[never]"
    if "[never]" in text or "[deny]" in text:
        return f"small pages, because {setting} turns huge ones off"
    return "transparent huge pages"
