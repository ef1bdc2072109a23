"""The publisher: what it writes and how long, and a real Redis that goes away and comes back empty."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest

from ampd.state.embedded import EmbeddedRedis
from ampd.state.known_worker import QUEUE_GRACE_S
from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import RoleAssigned, StateUnavailableError
from ampd.types import PrefillTask, Role, Slo, WorkerView
from tests.memory_store import MemoryState, MemoryStore
from tests.virtual_time import run_virtually
from tests.waiting import until
from workers.pending_changes import PendingChanges
from workers.publisher import Publisher


class Station:
    """A worker's view that the test changes."""

    def __init__(self) -> None:
        self.queue: tuple[PrefillTask, ...] = ()

    def view(self) -> WorkerView:
        return WorkerView("w1", Role.DECODE, queue=self.queue)


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def store(redis: EmbeddedRedis) -> AsyncIterator[StateStore]:
    opened = await open_store(redis.url, "test", timeout_s=0.5)
    yield opened
    await opened.close()


async def until_views(store: StateStore, condition: Callable[[list[WorkerView]], bool]) -> None:
    async def ask() -> bool:
        return condition(await store.snapshot())

    await until(ask)


def test_changes_heartbeats_and_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time, so that a busy machine lets no lease lapse."""

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        store = MemoryStore(MemoryState(clock), clock)
        station, changes = Station(), PendingChanges()
        publisher = Publisher(store, "w1", station.view, changes, lease_s=0.6)
        await publisher.start()
        for _ in range(200):
            await asyncio.sleep(0.05)
            assert [view.worker_id for view in await store.snapshot()] == ["w1"], "the heartbeat renews the lease"

        station.queue = (PrefillTask("t1", "s1", 0, 5, 0.0, Slo(1, 1)),)
        changes.changed()
        changes.held("s1", 320)
        await until_views(store, lambda views: views[0].held_tokens == {"s1": 320} and len(views[0].queue) == 1)
        station.queue = ()
        changes.finished("t1")
        changes.held("s1", 0)
        await until_views(store, lambda views: views[0].held_tokens == {} and not views[0].queue)

        await publisher.retire()
        assert await store.snapshot() == []
        await asyncio.sleep(10.0)
        assert await store.snapshot() == [], "nobody publishes any more"

    run_virtually(scenario(), monkeypatch, "workers.publisher")


class SlowStore(MemoryStore):
    """Each call takes 200 ms. `published_s` has the times of the publications, `reported` the finished prefills."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(MemoryState(clock), clock)
        self.published_s: list[float] = []
        self.reported: list[list[str]] = []
        self._now_s = clock

    async def publish_worker(self, view: WorkerView, lease_s: float, done: Sequence[str] = ()) -> RoleAssigned | None:
        await asyncio.sleep(0.2)
        self.published_s.append(self._now_s())
        self.reported.append(list(done))
        return await super().publish_worker(view, lease_s, done)


def test_a_late_publication_is_noticed_until_that_has_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        state = MemoryState(clock)
        times_s: list[float] = []
        lost_s: list[float] = []

        async def on_return() -> None:
            times_s.append(clock())
            if lost_s:
                raise StateUnavailableError(f"lost {lost_s.pop():g} s ago")

        changes = PendingChanges()
        publisher = Publisher(
            MemoryStore(state, clock), "w1", Station().view, changes, lease_s=3.0, on_return=on_return
        )
        await publisher.start()
        await asyncio.sleep(10.0)
        assert len(times_s) == 1, "its start"
        lost_s.append(0.0)
        state.lose()
        await asyncio.sleep(10.0)
        state.restore()
        await asyncio.sleep(10.0)
        assert len(times_s) == 3, "once more after the failure"
        await publisher.retire()
        publisher.resume()
        await asyncio.sleep(10.0)
        assert len(times_s) == 4
        await publisher.retire()

    run_virtually(scenario(), monkeypatch, "workers.publisher", "workers.pending_changes")


def test_a_slow_store_opens_no_gap_between_two_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight prefills finish per second, after an outage in which 5,000 finished."""

    async def scenario() -> None:
        store, changes, lease_s = SlowStore(asyncio.get_running_loop().time), PendingChanges(), 5.0
        publisher = Publisher(store, "w1", Station().view, changes, lease_s)
        for number in range(5_000):
            changes.finished(f"old-{number}")
        await asyncio.sleep(QUEUE_GRACE_S + 1.0)
        for number in range(1_200):
            changes.finished(f"backlog-{number}")
        await publisher.start()
        for number in range(320):
            changes.finished(f"new-{number}")
            await asyncio.sleep(0.125)
        await asyncio.sleep(1.0)
        await publisher.retire()
        gaps_s = [later - earlier for earlier, later in itertools.pairwise(store.published_s)]
        assert max(gaps_s) < lease_s / 2
        reported = [task_id for task_ids in store.reported for task_id in task_ids]
        assert sorted(reported) == sorted(
            [f"backlog-{number}" for number in range(1_200)] + [f"new-{number}" for number in range(320)]
        ), "what is older than the grace means nothing any more"
        assert max(map(len, store.reported)) <= 500

    run_virtually(scenario(), monkeypatch, "workers.publisher", "workers.pending_changes")


def test_leaving_waits_for_the_publication_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, changes = SlowStore(asyncio.get_running_loop().time), PendingChanges()
        publisher = Publisher(store, "w1", Station().view, changes, lease_s=5.0)
        await publisher.start()
        changes.held("s1", 16)
        await asyncio.sleep(0.1)
        assert len(store.published_s) == 1
        await publisher.retire()
        assert len(store.published_s) == 2, "it was not broken off, because it could arrive after the removal"
        assert await store.snapshot() == []

    run_virtually(scenario(), monkeypatch, "workers.publisher", "workers.pending_changes")


def test_leaving_during_the_first_publication_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may come at any moment of a start."""

    async def scenario() -> None:
        store = SlowStore(asyncio.get_running_loop().time)
        publisher = Publisher(store, "w1", Station().view, PendingChanges(), lease_s=5.0)
        starting = asyncio.create_task(publisher.start())
        await asyncio.sleep(0.1)
        await publisher.retire()
        await starting
        await asyncio.sleep(1.0)
        assert await store.snapshot() == []

    run_virtually(scenario(), monkeypatch, "workers.publisher", "workers.pending_changes")


async def test_a_redis_that_comes_back_empty_hears_everything_again(
    redis: EmbeddedRedis, store: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    changes = PendingChanges()
    publisher = Publisher(store, "w1", Station().view, changes, lease_s=1.0)
    await publisher.start()
    changes.held("before", 160)
    await until_views(store, lambda views: views[0].held_tokens == {"before": 160})
    redis.stop()
    changes.held("while-lost", 320)
    changes.finished("t9")
    await until(lambda: not publisher.available)
    redis.start()
    await until_views(store, lambda views: bool(views))
    assert (await store.snapshot())[0].held_tokens == {"before": 160, "while-lost": 320}
    await until(lambda: publisher.available)
    await publisher.retire()
    said = [record.getMessage() for record in caplog.records if record.name == "workers.publisher"]
    assert len([line for line in said if "lost" in line]) == 1, "once, not at every try"
    assert said[-1] == "the shared state is back"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefills", "sessions", "least_s"), [(128, 0, 0.0256), (0, 4000, 0.2), (128, 4000, 0.2256), (0, 100_000, 5.0 / 3)]
)
def test_a_large_view_goes_out_less_often(
    monkeypatch: pytest.MonkeyPatch, prefills: int, sessions: int, least_s: float
) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        store = SlowStore(clock)
        station, changes = Station(), PendingChanges()
        station.queue = tuple(PrefillTask(f"t{number}", "s", 0, 5, 0.0, Slo(1, 1)) for number in range(prefills))
        for number in range(sessions):
            changes.held(f"s{number}", 16)
        publisher = Publisher(store, "w1", station.view, changes, lease_s=5.0)
        await publisher.start()
        while len(store.published_s) < 4:
            changes.changed()
            await asyncio.sleep(0.02)
        pauses_s = [after - before - 0.2 for before, after in itertools.pairwise(store.published_s)]
        assert min(pauses_s) == pytest.approx(least_s, abs=0.021)
        assert min(pauses_s) >= least_s - 1e-6
        await publisher.retire()

    run_virtually(scenario(), monkeypatch, "workers.publisher")
