"""An exception in a task that must run as long as its process: it is logged, and the task goes on."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from zmq import PAIR
from zmq.asyncio import Context

from ampd.perf.piecewise import load_performance_model
from ampd.policies.base import PoolsSituation, RoleChange
from ampd.serving.roles import RoleReview
from ampd.state.store import RoleAssigned, StateEvent
from ampd.state.view import ClusterView
from ampd.supervised_task import SupervisedTask
from ampd.types import Role, Slo, WorkerView
from router.decision_record import DecisionRecord, RoundFacts
from router.guard import StreamGuard
from router.lease_probe import LeaseProbe
from router.load_recorder import LoadRecorder
from router.pools import PoolsKeeper
from router.presence import Presence
from router.served import ServedRound
from tests.harness.scripted_endpoint import ScriptedEndpoint
from tests.memory_store import MemoryState, MemoryStore, MemoryWatcher
from tests.virtual_time import virtually
from tests.waiting import PATIENCE_S
from workers.kv.rank_messages import Forgotten, Hello, encode
from workers.kv.worker_process.rank_links import RankLinks
from workers.pending_changes import PendingChanges
from workers.publisher import Publisher
from workers.role import follow_roles

LEASE_S = 60.0


class FailsOnce:
    """Wraps a function: the first call after `arm` raises."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.is_armed = False
        self.has_failed = False

    def __call__(self, *arguments: Any) -> Any:
        if self.is_armed and not self.has_failed:
            self.has_failed = True
            raise ValueError("injected")
        return self._function(*arguments)


class FailingStore(MemoryStore):
    """The watchers of roles and events decode by `decode`."""

    def __init__(self, state: MemoryState) -> None:
        super().__init__(state)
        self.decode = FailsOnce(lambda event: event)

    def watch(self) -> MemoryWatcher:
        return self._failing(super().watch())

    def watch_roles(self) -> MemoryWatcher:
        return self._failing(super().watch_roles())

    def _failing(self, watcher: MemoryWatcher) -> MemoryWatcher:
        class Failing(MemoryWatcher):
            async def __anext__(inner) -> StateEvent:  # noqa: N805
                return self.decode(await super().__anext__())  # type: ignore[no-any-return]

        watcher.__class__ = Failing
        return watcher


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    lines = [record for record in caplog.get_records("call") if record.levelno == logging.ERROR and record.exc_info]
    assert len(lines) == 1, "each failure is logged once"
    assert lines[0].name == "ampd.supervised_task"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def view_of(worker_id: str, role: Role = Role.DECODE) -> WorkerView:
    return WorkerView(worker_id, role)


@virtually
async def test_the_view_follows_again() -> None:
    state = MemoryState()
    store = FailingStore(state)
    async with ClusterView(store, lease_s=LEASE_S) as view:
        store.decode.is_armed = True
        await MemoryStore(state).publish_worker(view_of("d1"), LEASE_S)
        await until(lambda: store.decode.has_failed)
        await until(view.decode)
        await MemoryStore(state).publish_worker(view_of("d2"), LEASE_S)
        await until(lambda: len(view.decode()) == 2)


@virtually
async def test_the_role_listener_listens_again() -> None:
    state = MemoryState()
    store = FailingStore(state)
    leader, role = MemoryStore(state), RoleAssigned("w1", Role.PREFILL, "", "test")
    heard = asyncio.Event()

    async def work() -> None:
        await follow_roles(store, "w1", heard.set, retry_s=0.01)

    listener = SupervisedTask("roles", work, pause_s=0.01)
    listener.start()
    await leader.lead("c1", LEASE_S)
    store.decode.is_armed = True
    async with asyncio.timeout(PATIENCE_S):
        while not heard.is_set():
            await leader.assign_role("c1", role, LEASE_S)
            await asyncio.sleep(0.01)
    assert store.decode.has_failed
    await listener.stop()


@virtually
async def test_the_guard_checks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    view = ClusterView(MemoryStore(MemoryState()), lease_s=LEASE_S)
    guard = StreamGuard(view, silent_s=1.0, interval_s=0.01)
    checks: list[None] = []
    check = FailsOnce(lambda: checks.append(None))
    check.is_armed = True
    monkeypatch.setattr(guard, "check", check)
    guard.start()
    await until(lambda: checks)
    await guard.stop()


@virtually
async def test_the_lease_probe_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    view = ClusterView(MemoryStore(MemoryState()), lease_s=LEASE_S)
    asked: list[None] = []
    overdue = FailsOnce(lambda: asked.append(None) or [])
    overdue.is_armed = True
    monkeypatch.setattr(view, "overdue", overdue)
    probe = LeaseProbe(view, None, timeout_s=1.0, interval_s=0.01)  # type: ignore[arg-type]
    probe.start()
    await until(lambda: asked)
    await probe.stop()


@virtually
async def test_presence_goes_on_from_where_it_was() -> None:
    endpoint, live = ScriptedEndpoint(), [True]
    is_ready = FailsOnce(lambda: bool(live))
    presence = Presence(endpoint, is_ready)
    presence.start()
    live.clear()
    await until(lambda: not endpoint.is_registered)
    is_ready.is_armed = True
    await until(lambda: is_ready.has_failed)
    live.append(True)
    await until(lambda: endpoint.is_registered)
    await presence.stop()


@virtually
async def test_the_publisher_publishes_again() -> None:
    store, changes = MemoryStore(MemoryState()), PendingChanges()
    read = FailsOnce(lambda: view_of("d1"))
    publisher = Publisher(store, "d1", read, changes, LEASE_S)
    await publisher.start()
    read.is_armed = True
    changes.held("s1", 16)
    await until(lambda: read.has_failed)
    async with asyncio.timeout(PATIENCE_S):
        while not (await store.snapshot())[0].held_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await publisher.retire()


class AsksOften:
    """A pools policy that is asked each time and changes nothing."""

    is_idle = is_slow = False
    interval_s = load_s = 0.0

    def __init__(self) -> None:
        self.change = FailsOnce(self._noted)
        self.asked: list[PoolsSituation] = []

    def _noted(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        self.asked.append(situation)
        return ()


@virtually
async def test_roles_are_assigned_again() -> None:
    store, policy = MemoryStore(MemoryState()), AsksOften()
    review = RoleReview(policy, load_performance_model("tiny-cpu"), Slo(1.0, 0.1), random.Random(1))
    await store.publish_worker(view_of("d1"), LEASE_S)
    async with ClusterView(store, lease_s=LEASE_S) as view:
        keeper = PoolsKeeper(view, store, review, interval_s=0.01, lease_s=LEASE_S)
        policy.change.is_armed = True
        keeper.start()
        await until(lambda: policy.asked)
        assert policy.change.has_failed
        assert keeper.is_leading
        await keeper.stop()


@virtually
async def test_the_recorder_of_the_load_writes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(MemoryState())
    write = FailsOnce(store.record_load)
    write.is_armed = True
    monkeypatch.setattr(store, "record_load", write)
    recorder = LoadRecorder(store, LEASE_S)
    recorder.start()
    recorder(complete_round())
    await until(lambda: write.has_failed)
    recorder(complete_round())
    async with asyncio.timeout(PATIENCE_S):
        while not await store.recent_load():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await recorder.stop()


def complete_round() -> ServedRound:
    record = DecisionRecord(RoundFacts("s", "ampd", "key"))
    return ServedRound(
        record,
        Slo(1.0, 0.1),
        is_initial=False,
        is_complete=True,
        ttft_s=0.5,
        itl_s=0.05,
        output_tokens=7,
        was_left=False,
        lasted_s=2.0,
    )


async def test_the_channel_to_the_engine_reads_on() -> None:
    messages: list[Any] = []
    take = FailsOnce(lambda _rank, message: messages.append(message))
    take.is_armed = True
    links = RankLinks(1, take)
    context: Context = Context()
    engine = context.socket(PAIR)
    engine.connect(links.addresses[0])
    for message in (Hello(0, {}), Forgotten(1), Forgotten(2)):
        await engine.send(encode(message))
    await links.hellos(PATIENCE_S)
    await until(lambda: messages)
    assert messages == [Forgotten(2)]
    engine.close(0)
    context.term()
    await links.close()
