"""The KV exchange of modelled engines: a store without memory, and reads that take the modelled time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence

from ampd.background_tasks import BackgroundTasks
from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism
from ampd.wire import KvReply, KvRequest
from workers.kv.arrivals import Arrivals, have_come
from workers.kv.exchange import HeldListener, KvFetch, KvPeers
from workers.kv.foreign_peers import ForeignPeers
from workers.kv.geometry import PoolGeometry, Section
from workers.kv.store.directory import StoreDirectory
from workers.kv.store.figures import StoreFigures
from workers.kv.store.records import aligned_bytes
from workers.kv.store.sessions import Surplus

_POOL = "kv"
_LEASE_MARGIN_S = 1.0
_UNLEASE_TIMEOUT_S = 1.0


class ModelledExchange:
    """A KV store without memory: which pages are stored is exact, moving them is a sleep.

    Args:
        store_tokens: size of the store.
        fingerprint: of the model and the page size.
        surplus: as the directory's.
    """

    def __init__(
        self,
        model: PerformanceModel,
        parallelism: Parallelism,
        page_size: int,
        store_tokens: int,
        bytes_per_token: int,
        fingerprint: str = "",
        surplus: Surplus | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_size = page_size
        self._model = model
        self._parallelism = parallelism
        self._page_bytes = page_size * bytes_per_token
        self._fingerprint = fingerprint
        self._foreign = ForeignPeers()
        self._clock = clock
        pool = PoolGeometry(_POOL, (Section(_POOL, heads=1, layers=1, head_bytes=self._page_bytes),))
        pages = max(1, store_tokens // page_size)
        self.directory = StoreDirectory(pages * aligned_bytes(self._page_bytes), page_size, [pool], surplus)
        self._moved_pages = 0
        self._peers: KvPeers | None = None
        self._on_held: HeldListener = lambda _session_id, _tokens: None
        self._arrivals = Arrivals()
        self._late = BackgroundTasks()

    # -- the protocol

    def connect(self, peers: KvPeers, on_held: HeldListener) -> None:
        self._peers, self._on_held = peers, on_held

    async def serve(self, request: KvRequest) -> KvReply:
        try:
            return await self._serve(request)
        except (ValueError, KeyError, TypeError) as error:
            return {"error": f"{request.get('op')}: {type(error).__name__} {error}"}

    async def _serve(self, request: KvRequest) -> KvReply:
        match request["op"]:
            case "lease":
                lease = self.directory.lease(
                    request.get("keys", []),
                    request.get("ttl_s", _LEASE_MARGIN_S),
                    self._clock(),
                    request.get("reader", ""),
                )
                if not lease.id:
                    return {"lease_id": "", "matched": 0}
                descriptor = json.dumps({"tp": self._parallelism.tp, "fingerprint": self._fingerprint}).encode()
                return {"lease_id": lease.id, "matched": lease.pages, "descriptor": descriptor}
            case "unlease":
                self.directory.unlease(request.get("lease_id", ""), self._clock())
                return {}
            case "match":
                return {"matched": self.directory.match(request.get("keys", []))}
            case "release_session":
                return {"released_tokens": await self.release_session(request["session_id"])}
            case op:
                return {"error": f"unknown operation {op!r}"}

    def protect(self, rid: str, keys: Sequence[bytes]) -> int:
        return self.directory.protect(rid, keys, self._clock()).tokens

    async def fetch(
        self,
        rid: str,
        keys: Sequence[bytes],
        held_tokens: int,
        source_worker_id: str,
        timeout_s: float,
        expected_tokens: int | None = None,  # noqa: ARG002 - nothing is late
    ) -> KvFetch:
        start_s = self._clock()
        missing = keys[held_tokens // self.page_size :]
        if not missing:
            return KvFetch()
        try:
            async with asyncio.timeout(timeout_s):
                pages = await self._read(rid, missing, source_worker_id, timeout_s)
        except Exception as error:  # Whatever a peer answers, the round goes on and computes the KV itself.
            text = str(error) or f"timed out after {timeout_s:g} s"
            return KvFetch(seconds=self._clock() - start_s, error=text)
        tokens = self.protect(rid, keys) - held_tokens
        self._report_changes()
        return KvFetch(tokens, pages * self._page_bytes, self._clock() - start_s)

    async def unprotect(self, rid: str) -> None:
        self.directory.unprotect(rid)

    async def held_tokens(self, session_id: str, *, waits: bool = True) -> int:  # noqa: ARG002 - nothing is late
        return self.directory.sessions.held_tokens(session_id)

    async def release_session(self, session_id: str) -> int:
        held = self.directory.sessions.held_tokens(session_id)
        self.directory.sessions.release_session(session_id)
        self._report_changes()
        return held

    @property
    def session_tokens(self) -> int:
        return self.directory.session_tokens

    @property
    def shared_prefixes(self) -> Mapping[str, int]:
        return self.directory.sessions.shared.published()

    @property
    def figures(self) -> StoreFigures:
        return self.directory.figures

    @property
    def activity(self) -> int:
        return self._moved_pages

    # -- the engine's side

    @property
    def capacity_tokens(self) -> int:
        """How many tokens the store has room for."""
        return self.figures.capacity_bytes // aligned_bytes(self._page_bytes) * self.page_size

    def begin(self, rid: str, session_id: str, keys: Sequence[bytes], *, is_copy: bool = False) -> None:
        """A request starts: what is stored of its context stays until `end`."""
        if session_id:
            self.directory.sessions.begin_request(session_id, keys, is_copy=is_copy)
        self.directory.protect(rid, keys, self._clock())
        self._report_changes()

    def write(self, session_id: str, keys: Sequence[bytes]) -> None:
        """Store the pages of a context that has been computed, unless the store has no room for them."""
        reservation = self.directory.reserve(session_id, {_POOL: keys}, self._clock())
        if reservation is not None:
            self._moved_pages += len(reservation.offsets[_POOL])
            self.directory.written(reservation.id)
        self._report_changes()

    def end(self, rid: str, session_id: str, keys: Sequence[bytes]) -> None:
        """The request is over and left `keys` as the session's context."""
        if session_id:
            self.directory.sessions.end_request(session_id, keys)
        self.directory.unprotect(rid)
        self._report_changes()

    # -- inside

    async def _read(self, rid: str, missing: Sequence[bytes], source_worker_id: str, timeout_s: float) -> int:
        """Read pages from a peer into the store; returns how many."""
        pages, is_complete = 0, False
        while not is_complete:
            more, is_complete = await self._read_once(rid, missing, source_worker_id, timeout_s)
            pages += more
        return pages

    async def _read_once(
        self, rid: str, missing: Sequence[bytes], source_worker_id: str, timeout_s: float
    ) -> tuple[int, bool]:
        """Read what neither the store has nor another read brings; returns pages, and False if that one has failed."""
        if self._peers is None:
            raise ConnectionError("not connected to other workers yet")
        self._foreign.check(source_worker_id)
        lease: KvRequest = {"op": "lease", "keys": list(missing), "ttl_s": timeout_s + _LEASE_MARGIN_S}
        reply = await self._peers.call(source_worker_id, lease, timeout_s)
        if error := reply.get("error"):
            raise ConnectionError(f"worker {source_worker_id}: {error}")
        offered = min(len(missing), reply.get("matched", 0))
        if offered <= 0:
            return 0, True
        try:
            descriptor = json.loads(reply["descriptor"])
            if (theirs := descriptor["fingerprint"]) != self._fingerprint:
                self._foreign.refuse(source_worker_id, f"fingerprint differs: {self._fingerprint} here, {theirs} there")
            return await self._copy(rid, missing[:offered], Parallelism(tp=int(descriptor["tp"])))
        finally:
            # In the background, because the round that waits for these pages (or has just gone) must not wait for this.
            self._late.spawn(self._unlease(source_worker_id, reply.get("lease_id", "")))

    async def _copy(self, rid: str, keys: Sequence[bytes], source: Parallelism) -> tuple[int, bool]:
        # Of no session yet: its session takes them over when it begins.
        wanted = {_POOL: keys}
        others = self._arrivals.of(wanted)
        reservation = self.directory.reserve("", wanted, self._clock())
        if reservation is None:
            raise MemoryError("the KV store has no room")
        pages = len(reservation.offsets[_POOL])
        with self._arrivals.announced(wanted, reservation):
            try:
                await asyncio.sleep(self._model.kv_transfer_s(pages * self.page_size, source, self._parallelism))
            except BaseException:
                self.directory.give_up(reservation.id)
                raise
            self.directory.written(reservation.id, rid=rid)
        self._moved_pages += pages
        # The caller limits the time of the whole read.
        return pages, await have_come(others)

    async def _unlease(self, worker_id: str, lease_id: str) -> None:
        if self._peers is None:
            return
        try:
            await self._peers.call(worker_id, {"op": "unlease", "lease_id": lease_id}, _UNLEASE_TIMEOUT_S)
        except (TimeoutError, ConnectionError):
            return  # the lease ends by itself

    def _report_changes(self) -> None:
        for session_id, tokens in self.directory.sessions.take_changed().items():
            self._on_held(session_id, tokens)
