"""The KV exchange of a real engine: what other workers ask, the sessions, and reads from other workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ampd.wire import KvReply, KvRequest
from workers.kv.exchange import HeldListener, KvFetch, KvPeers
from workers.kv.store.figures import StoreFigures
from workers.kv.store.sessions import Surplus
from workers.kv.store_memory import StoreMemory
from workers.kv.worker_process.descriptor import Descriptor
from workers.kv.worker_process.engine_store import EngineStore
from workers.kv.worker_process.nixl_transport import NixlTransport
from workers.kv.worker_process.peer_reads import PeerReads, Transport

log = logging.getLogger(__name__)

_SETTLE_S = 2.0
"""The longest wait for pages that the engine has computed and not yet copied into the store."""


class StoreExchange:
    """`KvExchange` over a worker's store.

    Made before the engine, because the engine's ranks map the store and connect to `store.addresses`. It may be used
    after `open`.

    Args:
        ranks: of the engine (its tensor-parallel degree).
        make_transport: given the store's address in this process and its bytes.
        surplus: which KV of idle sessions may go first; None: none, the least recently used goes.
        has_checksums, checks_loads: see `EngineStore`.
    """

    def __init__(
        self,
        memory: StoreMemory,
        ranks: int,
        make_transport: Callable[[int, int], Transport] = NixlTransport,
        surplus: Surplus | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_checksums: bool = False,
        checks_loads: bool = False,
    ) -> None:
        self.store = EngineStore(
            memory, ranks, self._report, surplus, clock, has_checksums=has_checksums, checks_loads=checks_loads
        )
        self._make_transport = make_transport
        self._clock = clock
        self._transport: Transport | None = None
        self._reads: PeerReads | None = None
        self._on_held: HeldListener | None = None
        self._descriptor = b""

    async def open(self, timeout_s: float) -> None:
        """Meet the engine's ranks. Raises `TimeoutError`; `ValueError` if they differ."""
        await self.store.open(timeout_s)
        if self._transport is None:
            address, size_bytes = self.store.memory.address, self.store.memory.size_bytes
            self._transport = self._make_transport(address, size_bytes)
            self._descriptor = Descriptor(self.store.geometry, address, size_bytes, self._transport.metadata).encode()

    def connect(self, peers: KvPeers, on_held: HeldListener) -> None:
        if self._transport is None:
            raise RuntimeError("the exchange is not open")
        self._reads = PeerReads(self.store, self._transport, peers, self._clock)
        self._on_held = on_held
        self._report()

    @property
    def session_tokens(self) -> int:
        return self.store.directory.session_tokens

    @property
    def shared_prefixes(self) -> Mapping[str, int]:
        return self.store.directory.sessions.shared.published()

    @property
    def figures(self) -> StoreFigures:
        return self.store.directory.figures

    @property
    def activity(self) -> int:
        return self.store.activity

    # -- what other workers ask

    async def serve(self, request: KvRequest) -> KvReply:
        try:
            return await self._serve(request)
        except (TimeoutError, ConnectionError, ValueError, KeyError, TypeError) as error:
            return KvReply(error=f"{request.get('op')}: {type(error).__name__} {error}")

    async def _serve(self, request: KvRequest) -> KvReply:
        match request["op"]:
            case "lease":
                expected = request.get("expected", len(request["keys"]))
                return await self._lease(request["keys"], request["ttl_s"], request.get("reader", ""), expected)
            case "unlease":
                live = self.store.directory.unlease(request["lease_id"], self._clock())
                return KvReply() if live else KvReply(error="the lease had ended")
            case "match":
                return KvReply(matched=self.store.directory.match(request["keys"]))
            case "release_session":
                return KvReply(released_tokens=await self.release_session(request["session_id"]))
            case other:
                return KvReply(error=f"unknown operation {other!r}; known: lease, unlease, match, release_session")

    async def _lease(self, keys: Sequence[bytes], ttl_s: float, reader: str, expected: int) -> KvReply:
        if self.store.directory.match(keys) < min(expected, len(keys)):
            # An engine that is slow, hangs or has gone: what it has stored can be read all the same.
            with suppress(TimeoutError, ConnectionError):
                await self.store.settle(min(_SETTLE_S, ttl_s))
        lease = self.store.directory.lease(keys, ttl_s, self._clock(), reader)
        if not lease.id:
            # Without the descriptor, because with it a process can read and write the whole store.
            return KvReply(lease_id="", matched=0)
        if self._transport is not None:
            self._transport.let_read(time.monotonic() + lease.ttl_s)
        records = {pool: (list(places.names), list(places.offsets)) for pool, places in lease.records.items()}
        reply = KvReply(lease_id=lease.id, matched=lease.pages, records=records, descriptor=self._descriptor)
        if any(checksum is not None for found in lease.checksums.values() for checksum in found):
            reply["checksums"] = lease.checksums
        return reply

    # -- sessions

    async def held_tokens(self, session_id: str, *, waits: bool = True) -> int:
        try:
            if waits:
                await self.store.settle(_SETTLE_S)
        except (TimeoutError, ConnectionError) as error:
            log.warning("KV exchange: held_tokens: %s", error or "no answer")
        return self.store.directory.sessions.held_tokens(session_id)

    async def release_session(self, session_id: str) -> int:
        held = self.store.directory.sessions.held_tokens(session_id)
        self.store.directory.sessions.release_session(session_id)
        self._report()
        return held

    def _report(self) -> None:
        if self._on_held is None:
            return
        for session_id, tokens in self.store.directory.sessions.take_changed().items():
            self._on_held(session_id, tokens)

    # -- reading from other workers

    def protect(self, rid: str, keys: Sequence[bytes]) -> int:
        return self.store.protect(rid, keys).tokens

    async def fetch(
        self,
        rid: str,
        keys: Sequence[bytes],
        held_tokens: int,
        source_worker_id: str,
        timeout_s: float,
        expected_tokens: int | None = None,
    ) -> KvFetch:
        started_s = self._clock()
        page = self.store.geometry.page_size
        # Pools with windows need pages before the first missing one.
        start = max(0, held_tokens // page - self.store.longest_window_pages)
        missing = keys[start:]
        expected = len(keys) if expected_tokens is None else min(expected_tokens // page, len(keys))
        size, error = 0, None
        try:
            if held_tokens < len(keys) * page:
                if self._reads is None:
                    raise RuntimeError("the exchange is not connected")
                async with asyncio.timeout(timeout_s):
                    deadline_s = started_s + timeout_s
                    size = await self._reads.read(rid, missing, expected - start, source_worker_id, deadline_s)
        except TimeoutError:
            error = f"no KV from {source_worker_id} within {timeout_s:g} s"
        except Exception as failure:  # Whatever a peer answers, the round goes on and computes the KV itself.
            error = f"{type(failure).__name__}: {failure}"
        # Records that another read brought are here too, although this one has read no byte.
        tokens = self.store.protect(rid, keys).tokens - held_tokens if missing and error is None else 0
        self._report()
        return KvFetch(tokens, size, self._clock() - started_s, error)

    async def unprotect(self, rid: str) -> None:
        self.store.unprotect(rid)

    async def close(self) -> None:
        """End reads and the connections to the ranks, and unmap the store."""
        if self._reads is not None:
            await self._reads.close()
        if self._transport is not None:
            await asyncio.to_thread(self._transport.close)
        await self.store.close()
