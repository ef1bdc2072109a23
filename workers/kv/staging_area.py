"""Pages of peers on their way into the engine: read into staging memory, announced, and freed when they are used."""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from ctypes import addressof, c_char
from dataclasses import dataclass
from typing import Any, Protocol

from workers.kv.control import ControlLink, Message
from workers.kv.layout import Descriptor, PoolLayout
from workers.kv.staging import PageAllocator, StagingMemory, staging_layout

log = logging.getLogger(__name__)

_UNSTAGE_S = 60.0


class PageReader(Protocol):
    """How pages of a peer come into staging memory; `workers.kv.nixl_transport.NixlReader` is the real one."""

    def read(
        self, peer: str, descriptor: Descriptor, sources: Sequence[int], targets: Sequence[int]
    ) -> tuple[Future[int], Callable[[], None]]:
        """Start a read. The future ends only when nothing is written any more; the function gives the read up."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Staged:
    pages: list[int]
    expires_s: float


class StagingArea:
    """The staging memory of one worker.

    Args:
        place: process id, file descriptor and pages of the memory, as the engine's process announced them.
        make_reader: makes the transport's reader for this memory.
        ttl_s: pages that no request has used for this time are dropped.
    """

    def __init__(
        self,
        control: ControlLink,
        pool: PoolLayout,
        place: Message,
        make_reader: Callable[[PoolLayout], PageReader],
        ttl_s: float,
    ) -> None:
        self._control = control
        self._ttl_s = ttl_s
        self._memory = StagingMemory.open(place["process"], place["fd"], place["pages"] * pool.bytes_per_page)
        self._allocator = PageAllocator(place["pages"])
        self._reader = make_reader(staging_layout(pool, place["pages"], _address(self._memory.map)))
        self._staged: dict[str, _Staged] = {}
        self._tasks: set[asyncio.Future[Any]] = set()

    async def read(
        self, source: str, descriptor: Descriptor, wanted: Sequence[int], deadline_s: float
    ) -> tuple[list[int], int]:
        """Read pages of a peer, as many as there is room for; returns the staging pages that hold them, and bytes.

        Raises:
            TimeoutError, ConnectionError: the read failed.
            RuntimeError: there is no room.
        """
        pages = self._allocator.allocate(len(wanted))
        if not pages:
            raise RuntimeError("staging memory is full")
        done, abandon = self._reader.read(source, descriptor, wanted[: len(pages)], pages)
        try:
            left_s = deadline_s - time.monotonic()
            async with asyncio.timeout(left_s):
                size = await asyncio.shield(asyncio.wrap_future(done))
        except BaseException:
            abandon()
            # Until the transport is done with them, the pages may still be written, so they are not given out again.
            loop = asyncio.get_running_loop()
            done.add_done_callback(lambda _: loop.call_soon_threadsafe(self._allocator.free, pages))
            raise
        return pages, size

    async def keep_if(self, pages: list[int], check: Awaitable[bool]) -> bool:
        """Await a check of pages that were read. The pages are free again if it fails in any way."""
        passed = False
        try:
            passed = await check
        finally:
            if not passed:
                self._allocator.free(pages)
        return passed

    async def stage(self, rid: str, keys: list[bytes], pages: list[int]) -> None:
        """Announce pages to the engine's process. From here on they are free only when it has let go of them."""
        self._staged[rid] = _Staged(pages, time.monotonic() + self._ttl_s)
        try:
            await self._control.call({"op": "stage", "rid": rid, "pages": pages}, keys)
        except BaseException:
            self.later(self.discard(rid))
            raise

    async def discard(self, rid: str) -> None:
        """Drop the pages that were staged for a request."""
        staged = self._staged.pop(rid, None)
        if staged is None:
            return
        try:
            await self._control.call({"op": "unstage", "rid": rid}, timeout_s=_UNSTAGE_S)
        except (TimeoutError, ConnectionError, RuntimeError) as error:
            log.error("KV exchange: %d staging pages are lost: %s", len(staged.pages), error or "no answer")
            return
        self._allocator.free(staged.pages)

    async def drop_expired(self, rid: str) -> None:
        """Drop the pages that no request has used in time, and those of `rid`."""
        now_s = time.monotonic()
        stale = [name for name, staged in self._staged.items() if name == rid or staged.expires_s <= now_s]
        for name in stale:
            await self.discard(name)

    def discard_soon(self, rid: str) -> None:
        """`discard` in the background."""
        if rid in self._staged:
            self.later(self.discard(rid))

    def later(self, work: Coroutine[Any, Any, object]) -> None:
        """Do work in the background."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """End background work and transfers; the control channel is still open."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._reader.close()

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


def _address(memory: mmap.mmap) -> int:
    return addressof(c_char.from_buffer(memory))
