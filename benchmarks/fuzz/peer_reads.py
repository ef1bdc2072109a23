"""What a worker with a real KV store gets when it reads from another one: answers to its lease, and to its return.

Both stores are real. The transport copies between them as NIXL does: it refuses blocks outside of the owner's store.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from ampd.keys import page_keys
from ampd.wire import KvRequest
from benchmarks.fuzz.mutations import changed, changed_bytes
from benchmarks.fuzz.target import Target
from tests.workers.kv.exchange_lab import PAGE, RECORD, Peers, Worker, record_of
from tests.workers.kv.store.store_lab import forget_all
from workers.kv.peer_reads import Remote
from workers.kv.shared import StoreMemory

_PROMPT = list(range(6 * PAGE + 1))
_KEYS = page_keys(_PROMPT[:-1], PAGE, tenant="")
_UNDAMAGED = 0.3
"""Share of the inputs in which only the answer to the return of the lease is changed."""


class _Copies:
    """A transport between the stores of this process."""

    metadata = b"agent"
    owner: StoreMemory

    def __init__(self, address: int, size_bytes: int) -> None:
        self._address = address
        self._size_bytes = size_bytes
        self.own: StoreMemory | None = None

    def read(
        self, remote: Remote, theirs: Sequence[tuple[int, int]], ours: Sequence[tuple[int, int]]
    ) -> tuple[Future[int], Callable[[], None]]:
        assert self.own is not None
        assert all(0 <= offset <= offset + size <= self._size_bytes for offset, size in ours)
        assert [size for _, size in theirs] == [size for _, size in ours]
        done: Future[int] = Future()
        is_inside = all(0 <= offset <= offset + size <= self.owner.size_bytes for offset, size in theirs)
        if remote.agent != self.metadata or remote.address != self.owner.address or not is_inside:
            done.set_exception(ConnectionError("the transport refuses"))
            return done, lambda: None
        for (source, size), (target, _) in zip(theirs, ours, strict=True):
            self.own.map[target : target + size] = self.owner.map[source : source + size]
        done.set_result(sum(size for _, size in ours))
        return done, lambda: None

    def let_read(self, until_s: float) -> None:
        """Nothing to drive."""

    def close(self) -> None:
        """Nothing to close."""


class FuzzedReader:
    """A worker that owns KV, another that reads it, and the event loop of both."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._peers = Peers()
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self._owner, self._reader = _worker(), _worker()
        await self._owner.start(self._peers, "owner")
        await self._reader.start(self._peers, "reader")
        _Copies.owner = self._owner.exchange.store.memory
        self._transport.own = self._reader.exchange.store.memory
        await self._owner.compute("s", _PROMPT)

    @property
    def _transport(self) -> Any:
        return self._reader.exchange._transport

    def close(self) -> None:
        """Stop both."""
        for worker in (self._reader, self._owner):
            self._loop.run_until_complete(worker.close())
        self._loop.close()

    def targets(self) -> Iterator[Target]:
        """The reader of KV."""
        yield Target("KV read", lambda rng: (rng.random() < _UNDAMAGED, rng.random()), self._read, ())

    def _read(self, given: tuple[bool, float]) -> None:
        keeps_lease, seed = given
        self._loop.run_until_complete(self._read_from_liar(random.Random(seed), keeps_lease=keeps_lease))

    async def _read_from_liar(self, rng: random.Random, *, keeps_lease: bool) -> None:
        serve, store = self._owner.exchange.serve, self._reader.exchange.store
        has_checksums = True
        forget_all(store.directory)

        async def lie(request: KvRequest) -> Any:
            nonlocal has_checksums
            reply: Any = await serve(request)
            if "records" in reply:  # lists, as they come over the wire
                reply = {**reply, "records": {pool: list(found) for pool, found in reply["records"].items()}}
            if (request["op"] == "lease") == keeps_lease:
                return reply
            if request["op"] == "lease":
                reply = _changed_lease(rng, reply)
                has_checksums = _are_whole(reply)
                return reply
            return changed(rng, reply, 2)

        self._owner.exchange.serve = lie  # type: ignore[method-assign]
        try:
            fetched = await self._reader.read("rid", _PROMPT, "owner", 1.0)
        finally:
            self._owner.exchange.serve = serve  # type: ignore[method-assign]
        await self._reader.exchange.unprotect("rid")
        await asyncio.gather(*self._reader.exchange._reads._late._tasks)  # type: ignore[union-attr]
        assert 0 <= fetched.tokens <= len(_KEYS) * PAGE
        held = self._reader.stored(_KEYS)
        assert len(held) * PAGE == fetched.tokens
        assert store.directory.used_bytes == len(held) * RECORD
        if has_checksums:
            assert held == [record_of(key) for key in _KEYS[: len(held)]]
        forget_all(store.directory)
        assert store.directory.used_bytes == 0
        self._owner.exchange.store.directory.collect(float("inf"))
        assert (await self._reader.read("rid", _PROMPT, "owner", 1.0)).tokens == len(_KEYS) * PAGE
        await self._reader.exchange.unprotect("rid")


def _changed_lease(rng: random.Random, reply: Any) -> Any:
    """Changed anywhere, or in its descriptor, or with records in other places."""
    kind = rng.random()
    if kind < 0.2:
        return {**reply, "descriptor": changed_bytes(rng, reply["descriptor"])}
    if kind < 0.6:
        return changed(rng, reply, 2)
    ((pool, (names, offsets)),) = reply["records"].items()
    at, step = rng.randrange(len(offsets)), rng.choice((-RECORD, RECORD, 7 * RECORD, 1, RECORD // 2))
    moved = [*offsets[:at], offsets[at] + step, *offsets[at + 1 :]]
    return {**reply, "records": {pool: [names, rng.choice((moved, offsets[::-1]))]}}


def _are_whole(reply: Any) -> bool:
    """Whether the answer has a checksum for every record. Without it the reader must believe the offsets."""
    try:
        return all(
            len(reply["checksums"][pool]) == len(offsets) and None not in reply["checksums"][pool]
            for pool, (_, offsets) in reply["records"].items()
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return False


def _worker() -> Worker:
    worker = Worker()
    worker.exchange._make_transport = _Copies
    return worker
