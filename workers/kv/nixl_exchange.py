"""The KV exchange of a real engine, in the worker's process: directories over `KvPeers`, pages over NIXL."""

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

from ampd.page_keys import page_keys
from ampd.wire import KvReply, KvRequest
from workers.kv.control import ControlLink, Message
from workers.kv.exchange import HeldListener, KvFetch, KvPeers
from workers.kv.layout import Descriptor, PoolLayout, decode_descriptor, mismatch
from workers.kv.staging import PageAllocator, StagingMemory, staging_layout

logger = logging.getLogger(__name__)

_LEASE_MARGIN_S = 2.0
"""A lease outlives the read that it protects by this much; the reader's own limit comes first."""
_CLEAN_UP_S = 5.0
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


class NixlExchange:
    """`KvExchange` over the engine's own pool.

    Made before the engine, because the engine's process connects to `address`; usable after `open`.

    Args:
        make_reader: makes the transport's reader for the local staging memory.
        staged_ttl_s: pages that no request has used for so long are dropped.
    """

    def __init__(self, make_reader: Callable[[PoolLayout], PageReader], staged_ttl_s: float = 120.0) -> None:
        self._control = ControlLink(self._on_event)
        self._make_reader = make_reader
        self._staged_ttl_s = staged_ttl_s
        self._peers: KvPeers | None = None
        self._on_held: HeldListener | None = None
        self._held: dict[str, int] = {}
        self._staged: dict[str, _Staged] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._reader: PageReader | None = None
        self._memory: StagingMemory | None = None
        self.pinned_tokens = 0
        self.budget_tokens = 0

    @property
    def address(self) -> str:
        """Where the linker in the engine's process connects."""
        return self._control.address

    async def open(self, timeout_s: float) -> None:
        """Meet the linker and map its staging memory. Raises `TimeoutError`."""
        hello = await self._control.hello(timeout_s)
        self.layout = PoolLayout.from_json(hello["layout"])
        self._descriptor = Descriptor(self.layout, bytes.fromhex(hello["agent"])).encode()
        self.budget_tokens = hello["budget_tokens"]
        place = hello["staging"]
        size = place["pages"] * self.layout.bytes_per_page
        self._memory = StagingMemory.open(place["process"], place["fd"], size)
        self._allocator = PageAllocator(place["pages"])
        self._reader = self._make_reader(staging_layout(self.layout, place["pages"], _address(self._memory.map)))

    def connect(self, peers: KvPeers, on_held: HeldListener) -> None:
        self._peers, self._on_held = peers, on_held
        for session_id, tokens in self._held.items():
            on_held(session_id, tokens)

    @property
    def staging_free_tokens(self) -> int:
        return self._allocator.free_pages * self.layout.page_size

    def held_now(self, session_id: str) -> int:
        """Held tokens as last told by the engine's process; no I/O."""
        return self._held.get(session_id, 0)

    # -- what peers ask

    async def serve(self, request: KvRequest) -> KvReply:
        try:
            return await self._serve(request)
        except (TimeoutError, RuntimeError, KeyError) as error:
            return KvReply(error=f"{request.get('op')}: {type(error).__name__} {error}")

    async def _serve(self, request: KvRequest) -> KvReply:
        match request["op"]:
            case "lease":
                reply = await self._control.call({"op": "lease", "ttl_s": request["ttl_s"]}, request["keys"])
                pages = reply["pages"]
                return KvReply(pages=pages, matched=len(pages), lease_id=reply["lease"], descriptor=self._descriptor)
            case "unlease":
                reply = await self._control.call({"op": "unlease", "lease": request["lease_id"]})
                return KvReply() if reply["live"] else KvReply(error="the lease had ended")
            case "match":
                reply = await self._control.call({"op": "match"}, request["keys"])
                return KvReply(matched=reply["pages"])
            case "release_session":
                return KvReply(released_tokens=await self.release_session(request["session_id"]))
            case other:
                return KvReply(error=f"unknown operation {other!r}; known: lease, unlease, match, release_session")

    # -- sessions

    async def held_tokens(self, session_id: str) -> int:
        try:
            reply = await self._control.call({"op": "held", "session": session_id})
        except (TimeoutError, RuntimeError) as error:
            logger.warning("KV exchange: held_tokens: %s", error or "no answer")
            return self.held_now(session_id)
        return int(reply["tokens"])

    async def release_session(self, session_id: str) -> int:
        try:
            return int((await self._control.call({"op": "release", "session": session_id}))["tokens"])
        except (TimeoutError, RuntimeError) as error:
            logger.warning("KV exchange: release_session: %s", error or "no answer")
            return 0

    async def begin_request(self, session_id: str, keys: Sequence[bytes]) -> None:
        """A request of the session, with this context, is about to run: what is held of it stays."""
        await self._control.tell({"op": "begin", "session": session_id}, keys)

    async def end_request(self, session_id: str, keys: Sequence[bytes]) -> None:
        """The request is over; `keys` name the session's context now."""
        await self._control.tell({"op": "end", "session": session_id}, keys)

    async def stats(self) -> Message:
        """Pinned tokens in all and by session, and the number of pins."""
        return await self._control.call({"op": "stats"})

    def _on_event(self, message: Message) -> None:
        self.pinned_tokens = message["tokens"]
        for session_id, tokens in message["sessions"].items():
            if tokens:
                self._held[session_id] = tokens
            elif self._held.pop(session_id, None) is None:
                continue
            if self._on_held is not None:
                self._on_held(session_id, tokens)

    # -- fetching

    async def fetch(
        self,
        rid: str,
        session_id: str,
        token_ids: Sequence[int],
        source_worker_id: str,
        timeout_s: float,
        known_keys: Sequence[bytes] = (),
    ) -> KvFetch:
        started_s = time.monotonic()
        await self._drop_expired(rid)
        # The engine always computes the last token of a prompt itself.
        keys = page_keys(token_ids[: len(token_ids) - 1], self.layout.page_size, known_keys)
        try:
            tokens, size, error = await asyncio.wait_for(
                self._fetch(rid, session_id, keys, source_worker_id, started_s + timeout_s), timeout_s
            )
        except TimeoutError:
            tokens, size, error = 0, 0, f"no KV from {source_worker_id} within {timeout_s:g} s"
        except (ConnectionError, RuntimeError, ValueError, KeyError) as failure:
            tokens, size, error = 0, 0, f"{type(failure).__name__}: {failure}"
        return KvFetch(tokens, size, time.monotonic() - started_s, error)

    async def _fetch(
        self, rid: str, session_id: str, keys: list[bytes], source: str, deadline_s: float
    ) -> tuple[int, int, str | None]:
        if self._peers is None:
            raise RuntimeError("the exchange is not connected")
        have = (await self._control.call({"op": "have", "session": session_id}, keys))["pages"]
        missing = keys[have:]
        if not missing:
            return 0, 0, None
        left_s = deadline_s - time.monotonic()
        request = KvRequest(op="lease", keys=missing, ttl_s=left_s + _LEASE_MARGIN_S)
        reply = await self._peers.call(source, request, left_s)
        if "error" in reply or not reply["lease_id"]:
            return 0, 0, reply.get("error")
        given_back = False
        try:
            pages, size = await self._transfer(source, reply, deadline_s)
            # Only a lease that has lived until here vouches that the pages were still the ones that were asked for.
            given_back = True
            if not await self._owned(pages, self._unlease(source, reply["lease_id"], deadline_s)):
                return 0, 0, f"{source} ended the lease before its pages were read"
        finally:
            if not given_back:
                self._later(self._unlease(source, reply["lease_id"], time.monotonic() + _CLEAN_UP_S))
        await self._stage(rid, missing[: len(pages)], pages)
        short = len(pages) < len(reply["pages"])
        error = f"staging memory took {len(pages)} of {len(reply['pages'])} pages" if short else None
        return len(pages) * self.layout.page_size, size, error

    async def _transfer(self, source: str, reply: KvReply, deadline_s: float) -> tuple[list[int], int]:
        """Read leased pages; returns the staging pages that hold them, and bytes."""
        descriptor, wanted = decode_descriptor(reply["descriptor"]), reply["pages"]
        if different := mismatch(self.layout, descriptor.layout):
            raise ValueError(f"{source} has another kind of KV: {different}")
        if not 0 <= min(wanted) <= max(wanted) < descriptor.layout.pages:
            raise ValueError(f"{source} named pages outside its pool")
        pages = self._allocator.allocate(len(wanted))
        if not pages:
            raise RuntimeError("staging memory is full")
        assert self._reader is not None
        done, abandon = self._reader.read(source, descriptor, wanted[: len(pages)], pages)
        try:
            left_s = deadline_s - time.monotonic()
            size = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(done)), left_s)
        except BaseException:
            abandon()
            # Until the transport is done with them, the pages may still be written: nobody else gets them.
            loop = asyncio.get_running_loop()
            done.add_done_callback(lambda _: loop.call_soon_threadsafe(self._allocator.free, pages))
            raise
        return pages, size

    async def _owned(self, pages: list[int], check: Awaitable[bool]) -> bool:
        """Await a check; the pages are free again if it fails in any way."""
        passed = False
        try:
            passed = await check
        finally:
            if not passed:
                self._allocator.free(pages)
        return passed

    async def _stage(self, rid: str, keys: list[bytes], pages: list[int]) -> None:
        """Tell the engine's process; from here on the pages are free only when it has let go of them."""
        self._staged[rid] = _Staged(pages, time.monotonic() + self._staged_ttl_s)
        try:
            await self._control.call({"op": "stage", "rid": rid, "pages": pages}, keys)
        except BaseException:
            self._later(self.discard(rid))
            raise

    async def _unlease(self, source: str, lease_id: str, deadline_s: float) -> bool:
        assert self._peers is not None
        request = KvRequest(op="unlease", lease_id=lease_id)
        try:
            reply = await self._peers.call(source, request, max(0.1, deadline_s - time.monotonic()))
        except (TimeoutError, ConnectionError) as error:
            logger.debug("KV exchange: unlease at %s: %s", source, error)
            return False
        return "error" not in reply

    async def discard(self, rid: str) -> None:
        staged = self._staged.pop(rid, None)
        if staged is None:
            return
        try:
            await self._control.call({"op": "unstage", "rid": rid}, timeout_s=_UNSTAGE_S)
        except (TimeoutError, RuntimeError) as error:
            logger.error("KV exchange: %d staging pages are lost: %s", len(staged.pages), error or "no answer")
            return
        self._allocator.free(staged.pages)

    async def _drop_expired(self, rid: str) -> None:
        now_s = time.monotonic()
        stale = [name for name, staged in self._staged.items() if name == rid or staged.expires_s <= now_s]
        for name in stale:
            await self.discard(name)

    def discard_soon(self, rid: str) -> None:
        """`discard` without waiting for it."""
        if rid in self._staged:
            self._later(self.discard(rid))

    def _later(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End transfers and the channel."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._reader is not None:
            self._reader.close()
        await self._control.close()
        if self._memory is not None:
            self._memory.close()


def _address(memory: mmap.mmap) -> int:
    return addressof(c_char.from_buffer(memory))
