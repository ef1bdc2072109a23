"""The KV exchange of modelled engines: a page directory, and reads that take the time the performance model says."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence

from ampd.page_keys import page_keys
from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism
from ampd.wire import KvReply, KvRequest
from workers.kv.directory import PageDirectory
from workers.kv.exchange import HeldListener, KvFetch, KvPeers
from workers.kv.foreign_peers import ForeignPeers

_LEASE_MARGIN_S = 1.0
_UNLEASE_TIMEOUT_S = 1.0


class ModelledExchange:
    """KV memory without memory: which pages are held is exact, moving them is a sleep.

    Args:
        capacity_tokens: pinned pages and running requests share it.
        fingerprint: of the model and the page size.
    """

    def __init__(
        self,
        model: PerformanceModel,
        parallelism: Parallelism,
        page_size: int,
        capacity_tokens: int,
        bytes_per_token: int,
        fingerprint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_size = page_size
        self._model = model
        self._parallelism = parallelism
        self._capacity_tokens = capacity_tokens
        self._page_bytes = page_size * bytes_per_token
        self._fingerprint = fingerprint
        self._foreign = ForeignPeers()
        self._clock = clock
        self._directory = PageDirectory(page_size, capacity_tokens)
        self._staged: dict[str, list[bytes]] = {}
        self._next_page = 0
        self._peers: KvPeers | None = None
        self._on_held: HeldListener = lambda _session_id, _tokens: None
        self._background: set[asyncio.Task[None]] = set()

    # -- the protocol

    def connect(self, peers: KvPeers, on_held: HeldListener) -> None:
        """Give the exchange its way to other workers and its listener."""
        self._peers, self._on_held = peers, on_held

    async def serve(self, request: KvRequest) -> KvReply:
        """Answer a call of a peer or a coordinator."""
        keys, now_s = request.get("keys", []), self._clock()
        match request["op"]:
            case "lease":
                lease_id, held = self._directory.lease(keys, request.get("ttl_s", _LEASE_MARGIN_S), now_s)
                self._report_changes()
                descriptor = json.dumps({"tp": self._parallelism.tp, "fingerprint": self._fingerprint}).encode()
                return {"lease_id": lease_id, "matched": len(held), "descriptor": descriptor}
            case "unlease":
                self._directory.unlease(request.get("lease_id", ""), now_s)
                return {}
            case "match":
                return {"matched": self._matched(keys)}
            case "release_session":
                return {"released_tokens": await self.release_session(request["session_id"])}
            case op:
                return {"error": f"unknown operation {op!r}"}

    async def fetch(
        self,
        rid: str,
        session_id: str,  # noqa: ARG002
        token_ids: Sequence[int],
        source_worker_id: str,
        timeout_s: float,
        known_keys: Sequence[bytes] = (),
    ) -> KvFetch:
        """Lease the missing pages at the peer, sleep for their transfer, stage them for `rid`."""
        keys = page_keys(token_ids, self.page_size, known_keys)
        missing = keys[self._directory.match(keys) :]
        if not missing:
            return KvFetch()
        start_s = self._clock()
        try:
            async with asyncio.timeout(timeout_s):
                pages = await self._read(missing, source_worker_id, timeout_s)
        except Exception as error:  # Whatever a peer answers, the round goes on and computes the KV itself.
            text = str(error) or f"timed out after {timeout_s:g} s"
            return KvFetch(seconds=self._clock() - start_s, error=text)
        self._staged[rid] = missing[:pages]
        return KvFetch(pages * self.page_size, pages * self._page_bytes, self._clock() - start_s)

    async def discard(self, rid: str) -> None:
        """Drop what was staged for a request."""
        self._staged.pop(rid, None)

    async def held_tokens(self, session_id: str) -> int:
        """Tokens of the session's latest context that are pinned here."""
        return self._directory.held_tokens(session_id)

    async def release_session(self, session_id: str) -> int:
        """Unpin a session's pages; returns how many tokens it held."""
        held = self._directory.held_tokens(session_id)
        self._directory.release_session(session_id, self._clock())
        self._report_changes()
        return held

    # -- the engine's side

    @property
    def session_tokens(self) -> int:
        """Tokens of all pages that are kept."""
        return self._directory.tokens

    @property
    def activity(self) -> int:
        """Pages that were computed or read so far."""
        return self._next_page

    def begin(self, session_id: str, keys: Sequence[bytes]) -> None:
        """A request of the session starts: its pages stay until `end`."""
        self._directory.begin_request(session_id, keys, self._clock())
        self._report_changes()

    def end(self, session_id: str, keys: Sequence[bytes]) -> None:
        """The request is over and left `keys` as the session's context."""
        self._directory.end_request(session_id, keys, self._clock())
        self._report_changes()

    def usable_pages(self, rid: str, keys: Sequence[bytes]) -> int:
        """Length in pages of the prefix of `keys` that is pinned here or staged for the request."""
        held = self._directory.match(keys)
        staged = self._staged.get(rid, [])
        if not staged or held >= len(keys) or keys[held] not in staged:
            return held
        start = staged.index(keys[held])
        return held + sum(1 for ours, theirs in zip(keys[held:], staged[start:], strict=False) if ours == theirs)

    def keep(self, rid: str, session_id: str, keys: Sequence[bytes]) -> None:
        """Pin the pages of a context that has been computed or read; what was staged for the request is used up."""
        self._staged.pop(rid, None)
        new = keys[self._directory.match(keys) :]
        if new:
            pages = range(self._next_page, self._next_page + len(new))
            self._next_page += len(new)
            self._directory.add(session_id, new, pages)
        if session_id in self._directory.sessions:
            self._directory.touch(session_id, keys, self._clock())
        self._report_changes()

    def make_room(self, reserved_tokens: int) -> bool:
        """Release sessions, the least recently used first, until `reserved_tokens` fit beside the pins."""
        self._directory.budget_tokens = self._capacity_tokens - reserved_tokens
        self._directory.evict(self._clock())
        self._report_changes()
        return self._directory.tokens + reserved_tokens <= self._capacity_tokens

    # -- inside

    async def _read(self, missing: Sequence[bytes], source_worker_id: str, timeout_s: float) -> int:
        """Pages read from the peer."""
        if self._peers is None:
            raise ConnectionError("not connected to other workers yet")
        lease: KvRequest = {"op": "lease", "keys": list(missing), "ttl_s": timeout_s + _LEASE_MARGIN_S}
        reply = await self._peers.call(source_worker_id, lease, timeout_s)
        if error := reply.get("error"):
            raise ConnectionError(f"worker {source_worker_id}: {error}")
        pages = min(len(missing), reply.get("matched", 0))
        if not pages:
            return 0
        try:
            descriptor = json.loads(reply["descriptor"])
            if (theirs := descriptor["fingerprint"]) != self._fingerprint:
                self._foreign.refuse(source_worker_id, f"fingerprint differs: {self._fingerprint} here, {theirs} there")
            source = Parallelism(tp=int(descriptor["tp"]))
            await asyncio.sleep(self._model.kv_transfer_s(pages * self.page_size, source, self._parallelism))
        finally:
            # In the background, because the round that waits for these pages (or has just gone) must not wait for this.
            task = asyncio.create_task(self._unlease(source_worker_id, reply.get("lease_id", "")))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        return pages

    def _matched(self, keys: Sequence[bytes]) -> int:
        """Pages of the prefix of `keys` that is here, for whatever request."""
        held = self._directory.match(keys)
        if held == len(keys):
            return held
        readers = [rid for rid, staged in self._staged.items() if keys[held] in staged]
        return max((self.usable_pages(rid, keys) for rid in readers), default=held)

    async def _unlease(self, worker_id: str, lease_id: str) -> None:
        if self._peers is None:
            return
        try:
            await self._peers.call(worker_id, {"op": "unlease", "lease_id": lease_id}, _UNLEASE_TIMEOUT_S)
        except (TimeoutError, ConnectionError):
            return  # the lease ends by itself

    def _report_changes(self) -> None:
        for session_id, tokens in self._directory.take_changed().items():
            self._on_held(session_id, tokens)
