"""The KV exchange of a worker: what other workers ask, the sessions, and reads from other workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Self, TypeVar

from ampd.wire import KvReply, KvRequest
from workers.kv.peer_reads import Descriptor, KvPeers, KvStore, PeerReads, Transport, encode_descriptor
from workers.kv.store.directory import StoreFigures

log = logging.getLogger(__name__)

_SETTLE_S = 2.0
"""The longest wait for pages that the engine has computed and not yet copied into the store."""

HeldListener = Callable[[str, int], None]
"""Called with (session_id, held tokens) whenever that number changes; 0: released."""

Store = TypeVar("Store", bound=KvStore)


@dataclass(frozen=True, slots=True)
class KvFetch:
    """The result of one fetch.

    Attributes:
        tokens: tokens whose KV was read from the peer (full pages); 0 if nothing was missing or nothing was held there.
        bytes, seconds: of the transfer itself, directory look-up included.
        error: why it ended early; None: it did not. The missing part is recomputed.
    """

    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class KvExchange(Generic[Store]):
    """Moves the KV of sessions between workers. A transfer that fails raises nothing; its result has the error.

    Made before the engine, because the ranks of a real one map the store and connect to it. Used after `open`.

    Args:
        make_transport: given the store's address in this process and its bytes.
        clock: as the store's.
    """

    def __init__(
        self,
        store: Store,
        make_transport: Callable[[int, int], Transport],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        store.changed = self._report
        self._make_transport = make_transport
        self._clock = clock
        self._transport: Transport | None = None
        self._reads: PeerReads | None = None
        self._on_held: HeldListener | None = None

    async def open(self, timeout_s: float) -> None:
        """Meet the engine's ranks. Raises `TimeoutError`; `ValueError` if they differ."""
        await self.store.open(timeout_s)
        if self._transport is None:
            self._transport = self._make_transport(*self.store.place)

    def connect(self, peers: KvPeers, on_held: HeldListener) -> None:
        """Give the exchange its way to other workers and its listener, before the first fetch."""
        if self._transport is None:
            raise RuntimeError("the exchange is not open")
        self._reads = PeerReads(self.store, self._transport, peers, self._clock)
        self._on_held = on_held
        self._report()

    def without_engine(self, tokens: int) -> Self:
        """An exchange with a store of its own that has room for so many tokens, and with no engine."""
        other = type(self)(self.store.without_engine(tokens), self._make_transport, self._clock)
        other._transport = self._make_transport(*other.store.place)
        return other

    @property
    def session_tokens(self) -> int:
        """Tokens of the stored pages that sessions use, shared ones once; cheap, no I/O."""
        return self.store.directory.session_tokens

    @property
    def shared_prefixes(self) -> Mapping[str, int]:
        """Key -> tokens of the stored prefixes that several sessions have used; see `ampd.serving.shared_prefixes`."""
        return self.store.directory.sessions.shared.published()

    @property
    def figures(self) -> StoreFigures:
        """Size and use of the store; cheap, no I/O."""
        return self.store.directory.figures

    # -- what other workers ask

    async def serve(self, request: KvRequest) -> KvReply:
        """Answer a peer's (or a coordinator's) call: lease, unlease, match, release_session."""
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
        if self._transport is None:
            raise ConnectionError("the exchange is not open")
        in_place, offsets = self.store.in_place, chain.from_iterable(of.offsets for of in lease.records.values())
        if in_place is not None and not await in_place.are_written(offsets):
            raise ConnectionError("a copy of these records has failed")
        self._transport.let_read(time.monotonic() + lease.ttl_s)
        host, place = (in_place.host, in_place.place_for_neighbours) if in_place is not None else ("", None)
        descriptor = encode_descriptor(
            Descriptor(self.store.geometry, *self.store.place, self._transport.metadata, host, place)
        )
        records = {pool: (list(places.names), list(places.offsets)) for pool, places in lease.records.items()}
        reply = KvReply(lease_id=lease.id, matched=lease.pages, records=records, descriptor=descriptor)
        if any(checksum is not None for found in lease.checksums.values() for checksum in found):
            reply["checksums"] = lease.checksums
        return reply

    # -- sessions

    async def held_tokens(self, session_id: str, *, waits: bool = True) -> int:
        """How much of a session's latest context is held here, in tokens.

        Args:
            waits: for what the engine has computed and not stored yet. Otherwise this may be too little.
        """
        try:
            if waits:
                await self.store.settle(_SETTLE_S)
        except (TimeoutError, ConnectionError) as error:
            log.warning("KV exchange: held_tokens: %s", error or "no answer")
        return self.store.directory.sessions.held_tokens(session_id)

    async def release_session(self, session_id: str) -> int:
        """Forget a session; returns the tokens that it held."""
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
        """Protect what is stored of a context for request `rid`, until `unprotect`; returns its tokens."""
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
        """Read the pages that are missing here from a peer, and protect them for request `rid`.

        Args:
            keys: of the pages that the engine can use: all of the prompt but the page of its last token.
            held_tokens: what `protect` returned for them.
            expected_tokens: what the peer is expected to have of them; None: all. It waits for its engine only if it
                has less.
        """
        started_s = self._clock()
        page = self.store.geometry.page_size
        # Pools with windows need pages before the first missing one.
        start = max(0, held_tokens // page - self.store.geometry.longest_window_pages)
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
        """End the protection for a request that will not (or no longer) use it."""
        self.store.unprotect(rid)

    async def close(self) -> None:
        """End reads and the connections to the ranks, and unmap the store."""
        if self._reads is not None:
            await self._reads.close()
        if self._transport is not None:
            await asyncio.to_thread(self._transport.close)
        await self.store.close()
