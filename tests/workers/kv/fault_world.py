"""Workers without engines that serve sessions and read from each other over NIXL, while anything may go wrong.

The bytes of a record follow from its key, so that a wrong record shows. Which faults come follows from the seed. The
order in which threads and the transport work does not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

from ampd.keys import page_keys
from ampd.wire import KvReply, KvRequest
from tests.waiting import until
from tests.workers.kv.exchange_lab import PAGE, Rank, Worker, record_of
from tests.workers.kv.store.store_lab import forget_all, session_ids
from workers.kv.nixl_transport import NixlTransport
from workers.kv.shared import NEIGHBOUR_BYTES

RECORD_BYTES = 64 << 10
PAGES = 40
RANKS = 2
NAMES = ("a", "b", "c")
SESSIONS = 8
MOST_PAGES = 14
AT_ONCE = 6
"""Rounds and reads at the same time."""

FAULTS = frozenset(
    {
        "reader gone", "read late", "lease refused", "lease ended", "lease not returned", "owner frozen",
        "owner restarted", "engine restarted", "offers late", "offers lost", "offered twice", "evicted",
    }
)  # fmt: skip


class FaultyRank(Rank):
    """A rank that copies as slowly as the world says."""

    pause: Callable[[], None]

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        self.pause()
        super().write(pool, slots, offsets)


class FaultyWorker(Worker):
    """A worker of the world.

    Attributes:
        tasks: what runs here; it ends with the worker, and rounds end with its engine.
        is_frozen: it answers calls and does not move bytes.
    """

    def __init__(self, world: World, *, has_checksums: bool) -> None:
        host = "here" if world.in_place else ""
        super().__init__(RANKS, pages=PAGES, record_bytes=RECORD_BYTES, has_checksums=has_checksums, host=host)
        self._world = world
        self.tasks: dict[asyncio.Task[None], str] = {}
        self.is_frozen = False
        store, copy = self.exchange.store, self.exchange.store.copy

        def copy_late(*blocks: Any) -> Any:
            store._neighbours._copying.submit(time.sleep, world.random.uniform(0.0, 0.1))
            return copy(*blocks)

        store.copy = copy_late

    def rank(self, number: int) -> FaultyRank:
        made = FaultyRank(self.exchange, number, self.geometry)
        made.pause = self._world.pause
        return made

    @property
    def transport(self) -> NixlTransport:
        transport = self.exchange._transport
        assert isinstance(transport, NixlTransport)
        return transport

    async def end_tasks(self, *kinds: str) -> None:
        """As a worker that ends, or whose engine does: nobody waits for these any more."""
        ended = [task for task, kind in self.tasks.items() if kind in kinds]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)


class FaultyPeers:
    """`KvPeers` of the world: calls fail, come late, or find that a lease has ended."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        world = self._world
        fault = world.random.random()
        if request["op"] == "lease" and fault < 0.05:
            world.faults["lease refused"] += 1
            raise ConnectionError(f"{worker_id} does not answer")
        async with asyncio.timeout(timeout_s):
            if fault < 0.15:
                await asyncio.sleep(world.random.uniform(0.0, 0.3))
            worker = world.workers.get(worker_id)
            if worker is None:
                raise ConnectionError(f"{worker_id} has gone")
            # On one host a lease holds as long as the reader's own clock says.
            if request["op"] == "unlease" and 0.15 < fault < 0.25 and not world.in_place:
                world.faults["lease ended"] += 1
                worker.exchange.store.directory.collect(world.later_s)
            if request["op"] == "unlease" and 0.25 < fault < 0.3:
                world.faults["lease not returned"] += 1
                raise ConnectionError(f"{worker_id} does not answer")
            reply = await worker.exchange.serve(request)
            if request["op"] == "lease" and fault > 0.85 and not world.in_place:
                world.faults["lease ended"] += 1
                worker.exchange.store.directory.collect(world.later_s)
            return reply


class World:
    """Three workers, whose stores have room for a part of the sessions."""

    def __init__(self, seed: int, *, has_checksums: bool, in_place: bool = False) -> None:
        self.in_place = in_place
        self.random = random.Random(seed)
        self._pauses = random.Random(seed)
        self._has_checksums = has_checksums
        self.faults: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.workers: dict[str, FaultyWorker] = {}
        self._contexts: list[list[int]] = [[] for _ in range(SESSIONS)]
        self._rids = 0
        self._failures: list[BaseException] = []

    @property
    def later_s(self) -> float:
        """When all leases have ended."""
        return time.monotonic() + 1000.0

    def pause(self) -> None:
        """In the thread of a rank: now and then a copy takes long."""
        if self._pauses.random() < 0.1:
            self.faults["offers late"] += 1
            time.sleep(self._pauses.uniform(0.0, 0.05))

    async def run(self, faults: int, reads: int = 5, kinds: AbstractSet[str] = frozenset()) -> None:
        """Let things happen until there were so many faults and reads, and at least one fault of each of `kinds`.

        Then everything ends, and nothing may be left.
        """
        weights_by_action: dict[Callable[[FaultyWorker], Awaitable[None]], float] = {
            self.start_round: 20,
            self.start_read: 25,
            self.stop_reader: 3,
            self.freeze: 2,
            self.restart_engine: 1.5,
            self.restart_worker: 1.5,
        }
        try:
            for name in NAMES:
                await self.start_worker(name)
            while not self._failures and (
                self.faults.total() < faults
                or self.done["read"] < reads
                or not all(self.faults[kind] for kind in kinds)
            ):
                worker = self.random.choice(list(self.workers.values()))
                (action,) = self.random.choices(list(weights_by_action), list(weights_by_action.values()))
                await action(worker)
                self.check(self.random.choice(list(self.workers.values())), self.random.choice(self._contexts))
                await asyncio.sleep(self.random.choice([0.0, 0.0, 0.002, 0.01]))
            await self.finish()
        finally:
            for worker in self.workers.values():
                await worker.end_tasks("round", "read")
                await worker.close()
        for failure in self._failures:
            raise failure

    async def start_worker(self, name: str) -> None:
        worker = FaultyWorker(self, has_checksums=self._has_checksums)
        worker.start_ranks()
        await worker.exchange.open(30.0)
        worker.exchange.connect(FaultyPeers(self), worker.held.__setitem__)
        let_read = worker.transport.let_read
        worker.transport.let_read = lambda until_s: None if worker.is_frozen else let_read(until_s)
        self.workers[name] = worker

    # -- rounds

    async def start_round(self, worker: FaultyWorker) -> None:
        """A session's context grows, and is computed and stored here."""
        number = self.random.randrange(SESSIONS)
        context = self._contexts[number]
        if len(context) > MOST_PAGES * PAGE or self.random.random() < 0.1:
            # It begins as another one does, as with a common system prompt.
            context = self.random.choice(self._contexts)[: self.random.randint(0, 6) * PAGE]
        context = [*context, *self.random.choices(range(1000), k=self.random.randint(5, 4 * PAGE))]
        self._contexts[number] = context
        await self.start(worker, "round", self.round(worker, f"s{number}", context))

    async def round(self, worker: FaultyWorker, session: str, context: list[int]) -> None:
        keys, rid, store = self.keys(context), self.rid(), worker.exchange.store
        try:
            await store.begin_request(rid, session, keys)
            await self.load(worker, rid)
            await self.offer(worker, session, keys)
            await store.settle(30.0)
        except ConnectionError:
            self.done["round failed"] += 1
        finally:
            store.end_request(rid, session, keys)
            await worker.exchange.unprotect(rid)
        self.done["round"] += 1

    async def load(self, worker: FaultyWorker, rid: str) -> None:
        """The ranks load what the request may load, while other things go on."""
        ranks = list(worker.ranks)
        for rank in ranks:
            rank.link.begin_load(rid)
        try:
            for _ in range(3):
                for rank in ranks:
                    if rank._memory.map.closed:
                        continue  # it has ended with its engine
                    loadable = rank.link.loadable(rid)
                    for key, offset in loadable.records.get("kv", {}).items():
                        if offset < NEIGHBOUR_BYTES:
                            found = rank.read(offset)
                        elif offset // NEIGHBOUR_BYTES in rank.neighbours:
                            found = rank.read(offset)
                            self.done["loaded in place"] += 1
                        else:
                            continue  # the engine has started again: such a load fails
                        if time.monotonic() < loadable.until_s:
                            assert found == rank.part_of(bytes.fromhex(key)), f"{rid} loads another record"
                        self.done["loaded"] += 1
                await asyncio.sleep(self.random.uniform(0.0, 0.02))
        finally:
            for rank in ranks:
                with suppress(OSError):  # it has ended with its engine
                    rank.link.end_load(rid)

    async def offer(self, worker: FaultyWorker, session: str, keys: Sequence[bytes]) -> None:
        """SGLang offers the pages to all ranks, in some parts, now and then once more, or forgets what it offered."""
        fault = self.random.random()
        middle = self.random.randint(0, len(keys))
        parts = [keys[:middle], keys[middle:]]
        if fault < 0.1:
            self.faults["offered twice"] += 1
            parts += [keys]
        for part in parts:
            for rank in worker.ranks:
                rank.offer(session, part)
        if 0.1 < fault < 0.15:
            self.faults["offers lost"] += 1
            # In a thread, because a rank forgets its offers only after the copy that runs.
            await asyncio.gather(*(asyncio.to_thread(rank.link.reset) for rank in worker.ranks))

    # -- reads

    async def start_read(self, reader: FaultyWorker) -> None:
        source = self.random.choice([name for name, worker in self.workers.items() if worker is not reader])
        context = self.random.choice(self._contexts)
        timeout_s = self.random.choice([0.05, 0.2, 5.0])
        await self.start(reader, "read", self.read_and_use(reader, source, context, timeout_s))

    async def read_and_use(self, reader: FaultyWorker, source: str, context: list[int], timeout_s: float) -> None:
        """As a worker does before it submits a request."""
        keys, rid, exchange = self.keys(context), self.rid(), reader.exchange
        evicted_before = exchange.figures.evicted_tokens.get("idle", 0)
        try:
            held = exchange.protect(rid, keys)
            fetched = await exchange.fetch(rid, keys, held, source, timeout_s)
            self.done["read"] += bool(fetched.bytes)
            self.faults["read late"] += fetched.error is not None and "within" in fetched.error
            self.faults["evicted"] += exchange.figures.evicted_tokens.get("idle", 0) > evicted_before
            assert fetched.error is None or "checksum" not in fetched.error, fetched.error
            await asyncio.sleep(self.random.uniform(0.0, 0.02))
            self.check(reader, context)
            assert exchange.protect(rid, keys) >= held + fetched.tokens, "what was read has gone"
            if self.in_place:
                with suppress(ConnectionError):  # its engine starts again
                    await exchange.store.begin_request(rid, "", keys)
                    await self.load(reader, rid)
        finally:
            exchange.store.end_request(rid, "", keys)
            await exchange.unprotect(rid)

    async def stop_reader(self, reader: FaultyWorker) -> None:
        """A client leaves during its read."""
        reading = [task for task, kind in reader.tasks.items() if kind == "read"]
        if reading:
            self.random.choice(reading).cancel()
            self.faults["reader gone"] += 1

    # -- workers

    async def freeze(self, worker: FaultyWorker) -> None:
        """A worker moves no bytes for a while: reads from it begin, and end when it goes on."""
        if worker.is_frozen:
            self.thaw(worker)
            return
        worker.is_frozen = True
        self.faults["owner frozen"] += 1

    def thaw(self, worker: FaultyWorker) -> None:
        worker.is_frozen = False
        worker.transport.let_read(time.monotonic() + 30.0)

    async def restart_engine(self, worker: FaultyWorker) -> None:
        """The engine dies with its rounds and while it copies, and starts again over the same store."""
        await worker.end_tasks("round")
        for rank in worker.ranks:
            rank.offer("", self.keys(self.random.choices(range(1000), k=2 * PAGE)))
        await asyncio.sleep(self.random.choice([0.0, 0.002]))
        for rank in worker.ranks:
            rank.close()
        await worker.exchange.store.replace_engine()
        worker.start_ranks()
        await worker.exchange.open(30.0)
        self.faults["engine restarted"] += 1

    async def restart_worker(self, worker: FaultyWorker) -> None:
        """A worker ends, and another one takes its name while leases of the first are still out.

        What is on the wire arrives before, because agents of one process cannot be killed one by one. The test of the
        transport kills a process.
        """
        name = next(name for name, known in self.workers.items() if known is worker)
        del self.workers[name]
        await worker.end_tasks("round", "read")
        for other in (worker, *self.workers.values()):
            self.thaw(other)
        for other in (worker, *self.workers.values()):
            await until(lambda other=other: other.transport._jobs.empty() and not other.transport._active, 60.0)
        await worker.close()
        await self.start_worker(name)
        self.faults["owner restarted"] += 1

    # -- the end

    async def finish(self) -> None:
        """Nothing happens any more; then no page is protected, nothing is being written, and all memory is free."""
        for worker in self.workers.values():
            self.thaw(worker)
        for worker in self.workers.values():
            await asyncio.gather(*worker.tasks, return_exceptions=True)
        for name, worker in self.workers.items():
            exchange, directory = worker.exchange, worker.exchange.store.directory
            assert exchange._reads is not None
            await until(lambda worker=worker: not worker.transport._active and not worker.transport._leaving, 60.0)
            await until(lambda directory=directory: not directory._requests and not directory._writers, 60.0)
            await until(lambda exchange=exchange: not exchange.store._known and not exchange.store._late._tasks, 60.0)
            assert not exchange._reads._arrivals._reads, name
            directory.collect(self.later_s)
            assert not directory._leases, name
            for context in self._contexts:
                self.check(worker, context)
            for session in session_ids(directory):
                await exchange.release_session(session)
            assert directory.session_tokens == 0, name
            forget_all(directory)
            assert directory.used_bytes == directory.used_tokens == 0, f"records of {name} are left"

    # -- inside

    def keys(self, context: list[int]) -> list[bytes]:
        return page_keys(context, PAGE, tenant="")

    def rid(self) -> str:
        self._rids += 1
        return f"r{self._rids}"

    def check(self, worker: FaultyWorker, context: list[int]) -> None:
        """Every record of a context that can be found is the right one."""
        with suppress(ConnectionError):  # its engine has not started yet
            keys = self.keys(context)
            lent, offsets = worker.exchange.store._lent, worker.offsets(keys)
            for key, offset, record in zip(keys, offsets, worker.stored(keys), strict=False):
                assert offset in lent or record == record_of(key, RECORD_BYTES), "another record was found"

    async def start(self, worker: FaultyWorker, kind: str, work: Awaitable[None]) -> None:
        """Start something on a worker, when it has few enough things to do."""
        while len(worker.tasks) >= AT_ONCE:
            await asyncio.wait(worker.tasks, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        worker.tasks[task] = kind
        task.add_done_callback(lambda ended: self._ended(worker, ended))

    def _ended(self, worker: FaultyWorker, task: asyncio.Task[None]) -> None:
        del worker.tasks[task]
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failures.append(failure)
