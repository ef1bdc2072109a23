"""Two stores with real bytes under 10,000 faults: no record is read that differs from its key, and nothing leaks.

The records of a key have bytes that follow from the key. Writers write record by record, readers read record by record,
and anything may happen between two records: a reader dies, a writer stops half-way and starts again, a lease ends
during a read, memory is needed, writers finish out of order, a store forgets its records.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tests.workers.kv.store.store_lab import KV, MAMBA, PAGE, SWA, ByteStore, forget_all, keys, named
from workers.kv.shared import PoolGeometry
from workers.kv.store.directory import Loadable, PageLease, Reservation, StoreDirectory
from workers.kv.store.sessions import Surplus

POOLS = (KV, SWA, MAMBA)
SIZE_BYTES = 40 * MAMBA.record_bytes
SESSIONS = [f"s{number}" for number in range(12)]
FAULTS_PER_WORLD = 1000


@dataclass
class Writing:
    """A writer at work: the records that are left to write."""

    reservation_id: int
    left: list[tuple[str, bytes, int]]


@dataclass
class Loading:
    """A request that loads what is protected for it, record by record."""

    rid: str
    left: list[tuple[str, bytes, int]]


@dataclass
class Reading:
    """A peer that reads under a lease into its own store: records as (pool, key, offset there, offset here)."""

    lease_id: str
    source: ByteStore
    reservation_id: int
    left: list[tuple[str, bytes, int, int]]
    is_withdrawn: bool = False


@dataclass
class Worker:
    store: ByteStore
    writing: list[Writing] = field(default_factory=list)
    loading: list[Loading] = field(default_factory=list)
    reading: list[Reading] = field(default_factory=list)
    running: Counter[str] = field(default_factory=Counter)
    contexts: dict[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> StoreDirectory:
        return self.store.directory


class World:
    """Two workers that serve sessions and read from each other. Everything follows from the seed."""

    def __init__(self, seed: int, make_directory: type[StoreDirectory] = StoreDirectory) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.faults: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.contexts = dict.fromkeys(SESSIONS, "")
        self.workers = [self.new_worker(make_directory), self.new_worker(make_directory)]
        self.rids = 0

    def new_worker(self, make_directory: type[StoreDirectory]) -> Worker:
        directory = make_directory(SIZE_BYTES, PAGE, POOLS, lambda tokens, _session: tokens // 3)
        return Worker(ByteStore(directory, SIZE_BYTES, POOLS))

    def run(self, faults: int) -> None:
        weights_by_action = {
            self.begin: 8,
            self.offload: 12,
            self.end: 8,
            self.release: 1,
            self.write: 40,
            self.stop_writer: 3,
            self.protect: 6,
            self.load: 40,
            self.cancel_load: 1,
            self.lease: 16,
            self.read: 12,  # A read takes long enough for its lease to end during it.
            self.stop_reader: 6,
            self.withdraw: 3,
            self.wait: 10,
            self.forget: 0.3,
        }
        actions, weights = list(weights_by_action), list(weights_by_action.values())
        while self.faults.total() < faults:
            worker = self.random.choice(self.workers)
            self.random.choices(actions, weights)[0](worker)
            self.check_held(worker, self.random.choice(SESSIONS))
            self.check_evictable(worker)
        self.finish()

    def finish(self) -> None:
        """Everything ends, and then all memory is free."""
        for worker in self.workers:
            for writing in worker.writing:
                worker.directory.give_up(writing.reservation_id)
            for reading in worker.reading:
                worker.directory.give_up(reading.reservation_id)
            for loading in worker.loading:
                worker.directory.unprotect(loading.rid)
            for session in SESSIONS:
                worker.directory.sessions.release_session(session)
            worker.directory.collect(self.now_s + 100.0)
            self.check_visible(worker, SESSIONS)
            directory = worker.directory
            assert directory.session_tokens == 0
            forget_all(directory)
            assert directory.used_bytes == directory.used_tokens == 0, "records are left that nothing names"

    def check_held(self, worker: Worker, session: str) -> None:
        """What a session counts as held can be restored, of the context of its last request here."""
        held_tokens = worker.directory.sessions.held_tokens(session)
        context = worker.contexts.get(session, "")
        assert held_tokens <= worker.directory.match(keys(context)) * PAGE, "other pages than the context's are held"

    def check_evictable(self, worker: Worker) -> None:
        """The count of what may go is that of the records themselves."""
        runs = worker.directory._runs
        evictable = runs.pages - runs.protected_pages + runs.evictable_trailing.total()
        assert len(list(runs.evictable_offsets())) == evictable

    def check_all_is_held(self, worker: Worker, session: str) -> None:
        held_tokens = worker.directory.sessions.held_tokens(session)
        assert held_tokens == worker.directory.match(keys(self.contexts[session])) * PAGE

    def check_visible(self, worker: Worker, sessions: Sequence[str]) -> None:
        """Every record of the sessions' contexts that can be found is the right one."""
        for context in map(self.contexts.__getitem__, sessions):
            loadable = worker.directory.protect("check", keys(context), self.now_s)
            for pool, places in loadable.records.items():
                for key, offset in places:
                    worker.store.check(pool, key, worker.store.read(pool, offset))
            worker.directory.unprotect("check")

    # -- sessions and writers

    def begin(self, worker: Worker) -> None:
        session = self.random.choice(SESSIONS)
        context = self.contexts[session]
        if len(context) > 14 or self.random.random() < 0.1:
            context = context[: self.random.randint(0, 6)]
        grown = context + "".join(self.random.choices("ab", k=self.random.randint(1, 4)))
        self.contexts[session] = grown
        worker.running[session] += 1
        worker.contexts[session] = grown
        worker.directory.sessions.begin_request(session, keys(grown))
        self.check_all_is_held(worker, session)

    def offload(self, worker: Worker) -> None:
        session = self.random.choice(SESSIONS)
        context = keys(self.contexts[session])
        first = self.random.randint(0, max(0, len(context) - 2)) if self.random.random() < 0.3 else 0
        pages = context[first : self.random.randint(first, len(context))]
        given = {"kv": pages, "swa": pages[-2:], "mamba": pages[-1:]}
        before = worker.directory.evicted_tokens.total()
        reservation = worker.directory.reserve(session, given, self.now_s)
        self.note_pressure(worker, reservation, before)
        if reservation is not None:
            worker.writing.append(Writing(reservation.id, named(reservation.offsets, given)))

    def write(self, worker: Worker) -> None:
        """A writer writes some records; it may overtake earlier ones."""
        if worker.writing:
            writing = self.random.choice(worker.writing)
            for _ in range(min(len(writing.left), self.random.randint(1, 6))):
                worker.store.write(*writing.left.pop())
            if not writing.left:
                self.faults["finished out of order"] += writing is not worker.writing[0]
                worker.writing.remove(writing)
                worker.directory.written(writing.reservation_id)
                self.done["written"] += 1

    def stop_writer(self, worker: Worker) -> None:
        """The engine dies: all its writers stop half-way. Its sessions offer the pages again."""
        for writing in worker.writing:
            worker.directory.give_up(writing.reservation_id)
            self.faults["writer stopped"] += 1
        worker.writing.clear()

    def end(self, worker: Worker) -> None:
        if running := sorted(worker.running.elements()):
            session = self.random.choice(running)
            worker.running[session] -= 1
            worker.contexts[session] = self.contexts[session]
            worker.directory.sessions.end_request(session, keys(self.contexts[session]))
            self.check_all_is_held(worker, session)

    def release(self, worker: Worker) -> None:
        session = self.random.choice(SESSIONS)
        worker.running[session] = 0
        worker.directory.sessions.release_session(session)

    def forget(self, worker: Worker) -> None:
        forget_all(worker.directory)
        self.faults["forgotten"] += 1

    # -- requests that load

    def protect(self, worker: Worker) -> None:
        context = keys(self.contexts[self.random.choice(SESSIONS)])
        self.rids += 1
        loadable = worker.directory.protect(f"r{self.rids}", context, self.now_s)
        self.check_complete(loadable, context)
        records = [(pool, key, offset) for pool, places in loadable.records.items() for key, offset in places]
        worker.loading.append(Loading(f"r{self.rids}", records))

    def check_complete(self, loadable: Loadable, context: list[bytes]) -> None:
        pages = loadable.tokens // PAGE
        assert list(loadable.records["kv"].names) == context[:pages]
        assert set(context[max(0, pages - 2) : pages]) <= set(loadable.records["swa"].names)
        assert set(context[max(0, pages - 1) : pages]) <= set(loadable.records["mamba"].names)

    def load(self, worker: Worker) -> None:
        if worker.loading:
            loading = self.random.choice(worker.loading)
            for _ in range(min(len(loading.left), self.random.randint(1, 6))):
                pool, key, offset = loading.left.pop()
                worker.store.check(pool, key, worker.store.read(pool, offset))
                self.done["loaded"] += 1
            if not loading.left:
                worker.loading.remove(loading)
                worker.directory.unprotect(loading.rid)

    def cancel_load(self, worker: Worker) -> None:
        if worker.loading:
            loading = worker.loading.pop(self.random.randrange(len(worker.loading)))
            worker.directory.unprotect(loading.rid)
            self.faults["load cancelled"] += 1

    # -- peers

    def lease(self, reader: Worker) -> None:
        """A worker wants what the other has of a context: it leases there and reserves here."""
        source = next(worker for worker in self.workers if worker is not reader)
        session = self.random.choice(SESSIONS)
        context = keys(self.contexts[session])
        missing = context[reader.directory.match(context) :]
        lease = source.directory.lease(missing, self.random.randint(1, 10), self.now_s)
        if not lease.id:
            return
        given = {pool: [missing[at] for at, _ in places] for pool, places in lease.records.items()}
        before = reader.directory.evicted_tokens.total()
        reservation = reader.directory.reserve(session, given, self.now_s)
        self.note_pressure(reader, reservation, before)
        if reservation is None:
            source.directory.unlease(lease.id, self.now_s)
            return
        reader.reading.append(Reading(lease.id, source.store, reservation.id, self.pairs(lease, reservation, given)))

    def pairs(
        self, lease: PageLease, reservation: Reservation, given: dict[str, list[bytes]]
    ) -> list[tuple[str, bytes, int, int]]:
        return [
            (pool, given[pool][at], lease.records[pool].offsets[at], here)
            for pool, places in reservation.offsets.items()
            for at, here in places
        ]

    def read(self, reader: Worker) -> None:
        """A peer copies some records; when it has all, it keeps them only if the lease has held until now."""
        if not reader.reading:
            return
        reading = self.random.choice(reader.reading)
        for _ in range(min(len(reading.left), self.random.randint(1, 6))):
            pool, _, there, here = reading.left.pop()
            data = reading.source.read(pool, there)
            reader.store.memory[here : here + len(data)] = data
        if not reading.left:
            reader.reading.remove(reading)
            if reading.is_withdrawn:
                reader.directory.give_up(reading.reservation_id)
            elif reading.source.directory.unlease(reading.lease_id, self.now_s):
                reader.directory.written(reading.reservation_id)
                self.done["read"] += 1
            else:
                reader.directory.give_up(reading.reservation_id)
                self.faults["lease ended during a read"] += 1

    def stop_reader(self, reader: Worker) -> None:
        """A reader dies during its read: its lease is never given back, and ends by itself."""
        waited = [reading for reading in reader.reading if not reading.is_withdrawn]
        if waited:
            reading = self.random.choice(waited)
            reader.reading.remove(reading)
            reader.directory.give_up(reading.reservation_id)
            self.faults["reader died"] += 1

    def withdraw(self, reader: Worker) -> None:
        """Nobody waits for a read any more, and its bytes still come."""
        waited = [reading for reading in reader.reading if not reading.is_withdrawn]
        if waited:
            reading = self.random.choice(waited)
            reading.is_withdrawn = True
            reader.directory.withdraw(reading.reservation_id)
            self.faults["read withdrawn"] += 1

    # -- the rest

    def wait(self, worker: Worker) -> None:
        self.now_s += self.random.choice([0.1, 1.0, 3.0])
        worker.directory.collect(self.now_s)
        self.check_visible(worker, self.random.choices(SESSIONS, k=2))

    def note_pressure(self, worker: Worker, reservation: Reservation | None, evicted_before: int) -> None:
        if reservation is None:
            self.faults["refused"] += 1
            # A lease of the end of a context keeps its beginning, which the directory counts as evictable.
            if not worker.directory._leases:
                assert worker.directory.evicted_tokens.total() == evicted_before, "evicted in vain"
        elif worker.directory.evicted_tokens.total() > evicted_before:
            self.faults["evicted"] += 1


FAULTS = {
    "writer stopped", "finished out of order", "evicted", "refused", "forgotten", "load cancelled", "reader died",
    "read withdrawn", "lease ended during a read",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_no_fault_makes_a_wrong_record_readable_or_loses_memory(seed: int) -> None:
    world = World(seed)
    world.run(FAULTS_PER_WORLD)
    assert set(world.faults) == FAULTS
    assert min(world.done[what] for what in ("written", "loaded", "read")) > 50


class PublishesBeforeWritten(StoreDirectory):
    def reserve(self, session_id: str, keys: Mapping[str, Sequence[bytes]], now_s: float) -> Reservation | None:
        reservation = super().reserve(session_id, keys, now_s)
        if reservation is not None:
            for run in self._writers[reservation.id].runs:
                run.ready = True
        return reservation


class ForgetsHolds(StoreDirectory):
    def protect(self, rid: str, keys: Sequence[bytes], now_s: float) -> Loadable:
        loadable = super().protect(rid, keys, now_s)
        if loadable.tokens:
            self._runs.release(self._requests[rid])
        return loadable


class ReusesLeasedRecords(StoreDirectory):
    def lease(self, keys: Sequence[bytes], ttl_s: float, now_s: float, reader: str = "") -> PageLease:
        lease = super().lease(keys, ttl_s, now_s, reader)
        if lease.id:
            self._runs.release(self._leases[lease.id])
        return lease


class TrustsExpiredLeases(StoreDirectory):
    def unlease(self, lease_id: str, now_s: float) -> bool:
        super().unlease(lease_id, now_s)
        return True


class FreesWhatIsBeingWritten(StoreDirectory):
    def __init__(
        self, size_bytes: int, page_size: int, pools: Sequence[PoolGeometry], surplus: Surplus | None = None
    ) -> None:
        super().__init__(size_bytes, page_size, pools, surplus)
        self._runs.forget = self._runs.discard


class LosesMemoryOfStoppedWriters(StoreDirectory):
    def give_up(self, reservation_id: int) -> None:
        self._writers[reservation_id].trailing.clear()
        super().give_up(reservation_id)


class NeverEndsLeases(StoreDirectory):
    def collect(self, now_s: float) -> None:
        pass


@pytest.mark.long
@pytest.mark.parametrize(
    "broken",
    [
        PublishesBeforeWritten,
        ForgetsHolds,
        ReusesLeasedRecords,
        TrustsExpiredLeases,
        FreesWhatIsBeingWritten,
        LosesMemoryOfStoppedWriters,
        NeverEndsLeases,
    ],
)
def test_a_broken_directory_is_found_out(broken: type[StoreDirectory]) -> None:
    with pytest.raises(AssertionError, match=r"another record was read|records are left|evicted in vain"):
        run_worlds(broken)


def run_worlds(broken: type[StoreDirectory]) -> None:
    for seed in range(10):
        World(seed, broken).run(FAULTS_PER_WORLD)
