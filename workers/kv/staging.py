"""Staging memory: where pages read from a peer wait until the engine copies them into its own pool."""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Sequence
from itertools import pairwise

from workers.kv.layout import PoolLayout


class PageAllocator:
    """Free pages of a region, kept as extents so that what is allocated together lies together.

    Args:
        pages: number of pages, all free at first.
    """

    def __init__(self, pages: int) -> None:
        self._extents: list[tuple[int, int]] = [(0, pages)] if pages else []
        self.free_pages = pages

    def allocate(self, pages: int) -> list[int]:
        """Take `pages` pages, contiguous where possible; fewer where there are not as many."""
        fitting = [extent for extent in self._extents if extent[1] >= pages]
        if fitting:
            start, _ = min(fitting, key=lambda extent: extent[1])
            return self._take(start, pages)
        taken: list[int] = []
        for start, length in sorted(self._extents, key=lambda extent: -extent[1]):
            taken += self._take(start, min(length, pages - len(taken)))
            if len(taken) == pages:
                break
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back."""
        ordered = sorted(pages)
        if any(a == b for a, b in pairwise(ordered)):
            raise ValueError("a page is given back twice")
        for page in ordered:
            at = bisect.bisect_left(self._extents, (page, 0))
            before = self._extents[at - 1] if at else (0, 0)
            after = self._extents[at] if at < len(self._extents) else (-1, 0)
            if before[0] + before[1] > page or after[0] == page:
                raise ValueError(f"page {page} is free already")
            start, length = page, 1
            if at and before[0] + before[1] == page:
                at, start, length = at - 1, before[0], before[1] + 1
                del self._extents[at]
            if after[0] == page + 1:
                length += after[1]
                del self._extents[at]
            self._extents.insert(at, (start, length))
        self.free_pages += len(ordered)

    def _take(self, start: int, pages: int) -> list[int]:
        at = bisect.bisect_left(self._extents, (start, 0))
        _, length = self._extents[at]
        self._extents[at : at + 1] = [(start + pages, length - pages)] if length > pages else []
        self.free_pages -= pages
        return list(range(start, start + pages))


class StagingMemory:
    """Anonymous shared memory that two processes map. It disappears when both have ended, however they end.

    The engine's process creates it. The worker opens it by that process's id and file descriptor.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self.size_bytes = size_bytes
        self.map = mmap.mmap(fd, max(size_bytes, 1))

    @classmethod
    def create(cls, size_bytes: int) -> StagingMemory:
        fd = os.memfd_create("ampd-kv-staging", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(size_bytes, 1))
        return cls(fd, size_bytes)

    @classmethod
    def open(cls, process_id: int, fd: int, size_bytes: int) -> StagingMemory:
        return cls(os.open(f"/proc/{process_id}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), size_bytes)

    @property
    def place(self) -> tuple[int, int]:
        """Process id and file descriptor, for `open` elsewhere."""
        return os.getpid(), self._fd

    def close(self) -> None:
        """Unmap. Views that are still alive keep the mapping until they go."""
        try:
            self.map.close()
        except BufferError:
            return
        finally:
            os.close(self._fd)


def staging_layout(pool: PoolLayout, pages: int, address: int) -> PoolLayout:
    """The layout of staging memory at `address` for `pages` pages of a pool: the same buffers, one after the other."""
    addresses, at = [], address
    for width in pool.page_bytes:
        addresses.append(at)
        at += width * pages
    return PoolLayout(pool.fingerprint, pool.page_size, pages, pool.page_bytes, tuple(addresses))
