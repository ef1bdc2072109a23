"""The KV exchange of a real engine, in the worker's process: directories over `KvPeers`, pages over NIXL."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from ampd.page_keys import page_keys
from ampd.wire import KvReply, KvRequest
from workers.kv.control import ControlLink, Message
from workers.kv.exchange import HeldListener, KvFetch, KvPeers
from workers.kv.foreign_peers import ForeignPeers
from workers.kv.layout import Descriptor, PoolLayout, decode_descriptor, mismatch
from workers.kv.staging_area import PageReader, StagingArea

log = logging.getLogger(__name__)

_LEASE_MARGIN_S = 2.0
"""A lease outlives the read that it protects by this much; the reader's own limit comes first."""
_CLEAN_UP_S = 5.0


class NixlExchange:
    """`KvExchange` over the engine's own pool.

    Made before the engine, because the engine's process connects to `address`; usable after `open`.

    Args:
        make_reader: makes the transport's reader for the local staging memory.
        staged_ttl_s: pages that no request has used for this time are dropped.
    """

    def __init__(self, make_reader: Callable[[PoolLayout], PageReader], staged_ttl_s: float = 120.0) -> None:
        self._control = ControlLink(self._on_event)
        self._make_reader = make_reader
        self._staged_ttl_s = staged_ttl_s
        self._peers: KvPeers | None = None
        self._on_held: HeldListener | None = None
        self._held: dict[str, int] = {}
        self._foreign = ForeignPeers()
        self._staging: StagingArea | None = None
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
        self._staging = StagingArea(self._control, self.layout, hello["staging"], self._make_reader, self._staged_ttl_s)

    def connect(self, peers: KvPeers, on_held: HeldListener) -> None:
        self._peers, self._on_held = peers, on_held
        for session_id, tokens in self._held.items():
            on_held(session_id, tokens)

    @property
    def staging(self) -> StagingArea:
        """Where pages of peers wait for the engine; after `open`."""
        if self._staging is None:
            raise RuntimeError("the exchange is not open")
        return self._staging

    def held_now(self, session_id: str) -> int:
        """Held tokens as last published by the engine's process; no I/O."""
        return self._held.get(session_id, 0)

    # -- what peers ask

    async def serve(self, request: KvRequest) -> KvReply:
        try:
            return await self._serve(request)
        except (TimeoutError, ConnectionError, RuntimeError, KeyError) as error:
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
        except (TimeoutError, ConnectionError, RuntimeError) as error:
            log.warning("KV exchange: held_tokens: %s", error or "no answer")
            return self.held_now(session_id)
        return int(reply["tokens"])

    async def release_session(self, session_id: str) -> int:
        try:
            return int((await self._control.call({"op": "release", "session": session_id}))["tokens"])
        except (TimeoutError, ConnectionError, RuntimeError) as error:
            log.warning("KV exchange: release_session: %s", error or "no answer")
            return 0

    async def begin_request(self, session_id: str, keys: Sequence[bytes]) -> None:
        """A request of the session, with this context, is about to run: what is held of it stays."""
        await self._control.send({"op": "begin", "session": session_id}, keys)

    async def end_request(self, session_id: str, keys: Sequence[bytes]) -> None:
        """The request is over; `keys` name the session's context now."""
        await self._control.send({"op": "end", "session": session_id}, keys)

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
        await self.staging.drop_expired(rid)
        # The engine always computes the last token of a prompt itself.
        keys = page_keys(token_ids[: len(token_ids) - 1], self.layout.page_size, known_keys)
        try:
            async with asyncio.timeout(timeout_s):
                tokens, size, error = await self._fetch(rid, session_id, keys, source_worker_id, started_s + timeout_s)
        except TimeoutError:
            tokens, size, error = 0, 0, f"no KV from {source_worker_id} within {timeout_s:g} s"
        except Exception as failure:  # Whatever a peer answers, the round goes on and computes the KV itself.
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
            return 0, 0, str(reply["error"]) if "error" in reply else None
        if len(reply["pages"]) > len(missing):
            raise ValueError(f"{source} named more pages than were asked for")
        given_back = False
        try:
            pages, size = await self._transfer(source, reply, deadline_s)
            # The pages may be used only if the lease still holds now. Otherwise their owner may have reused them.
            given_back = True
            if not await self.staging.keep_if(pages, self._unlease(source, reply["lease_id"], deadline_s)):
                return 0, 0, f"{source} ended the lease before its pages were read"
        finally:
            if not given_back:
                self.staging.later(self._unlease(source, reply["lease_id"], time.monotonic() + _CLEAN_UP_S))
        await self.staging.stage(rid, missing[: len(pages)], pages)
        short = len(pages) < len(reply["pages"])
        error = f"staging memory took {len(pages)} of {len(reply['pages'])} pages" if short else None
        return len(pages) * self.layout.page_size, size, error

    async def _transfer(self, source: str, reply: KvReply, deadline_s: float) -> tuple[list[int], int]:
        """Read leased pages; returns the staging pages that hold them, and bytes."""
        descriptor, wanted = decode_descriptor(reply["descriptor"]), reply["pages"]
        if different := mismatch(self.layout, descriptor.layout):
            self._foreign.refuse(source, different)
        if not 0 <= min(wanted) <= max(wanted) < descriptor.layout.pages:
            raise ValueError(f"{source} named pages outside its pool")
        return await self.staging.read(source, descriptor, wanted, deadline_s)

    async def _unlease(self, source: str, lease_id: str, deadline_s: float) -> bool:
        assert self._peers is not None
        request = KvRequest(op="unlease", lease_id=lease_id)
        try:
            reply = await self._peers.call(source, request, max(0.1, deadline_s - time.monotonic()))
        except (TimeoutError, ConnectionError) as error:
            log.debug("KV exchange: unlease at %s: %s", source, error)
            return False
        return "error" not in reply

    async def discard(self, rid: str) -> None:
        await self.staging.discard(rid)

    def discard_soon(self, rid: str) -> None:
        """`discard` without waiting for it."""
        self.staging.discard_soon(rid)

    async def close(self) -> None:
        """End transfers and the channel."""
        if self._staging is not None:
            await self._staging.finish()
        await self._control.close()
        if self._staging is not None:
            self._staging.close()
