"""An exception in a task that must run as long as its process: it is logged, and the task goes on."""

from __future__ import annotations

import ast
import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from zmq import PAIR
from zmq.asyncio import Context

import workers.round_ends
from ampd.background_tasks import SupervisedTask
from ampd.call_signatures import Signer
from ampd.discovery_entries import DiscoveryEntries, DiscoveryEntry
from ampd.perf.corrections import CorrectedModel
from ampd.perf.presets import load_performance_model
from ampd.policies.base import PoolsSituation, RoleChange
from ampd.serving.roles import RoleReview
from ampd.state.store import RoleAssigned, StateEvent
from ampd.state.view import ClusterView
from ampd.types import CoordinatorView, Parallelism, Role, Slo, WorkerView
from benchmarks.structure import modules
from router import round_ends
from router.coordinator_publisher import CoordinatorViewPublisher
from router.pools import PoolsKeeper
from router.presence import Presence
from router.worker_access import LeaseProbe
from tests.harness.scripted_endpoint import ScriptedEndpoint
from tests.memory_store import MemoryState, MemoryStore, MemoryWatcher
from tests.virtual_time import virtually
from tests.waiting import PATIENCE_S
from workers.component import warn_of_wrong_times
from workers.kv.rank_links import RankLinks
from workers.kv.shared import Forgotten, Hello, KvGeometry, encode
from workers.pending_changes import PendingChanges
from workers.publisher import Publisher
from workers.role import follow_roles
from workers.session_releaser import SessionEnds, SessionReleaser

LEASE_S = 60.0
_ROOT = Path(__file__).parents[2]
Test = TypeVar("Test", bound=Callable[..., Any])
TESTS: dict[str, str] = {}
"""Name of a test here -> the name of its task. A name that ends with `-` is the beginning of several."""

ELSEWHERE = {
    "engine-watch": "tests/workers/test_component.py",
    "liveness probe": "tests/ampd/cli/serve/test_liveness.py",
}
"""Name of a task -> the file of its test."""


def breaks(task: str) -> Callable[[Test], Test]:
    """Decorator: a test lets this task fail."""

    def register(test: Test) -> Test:
        TESTS[test.__name__] = task
        return test

    return register


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
                return self.decode(await super().__anext__())

        watcher.__class__ = Failing
        return watcher


@pytest.fixture(autouse=True)
def logged(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    if task := TESTS.get(request.function.__name__):
        lines = [record for record in caplog.get_records("call") if record.levelno == logging.ERROR and record.exc_info]
        assert len(lines) == 1, "each failure is logged once"
        assert lines[0].getMessage().startswith(task)
        assert lines[0].getMessage().endswith(" failed; trying again")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def view_of(worker_id: str, role: Role = Role.DECODE) -> WorkerView:
    return WorkerView(worker_id, role)


@breaks("cluster-view")
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


@breaks("roles")
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


@breaks("untold-rounds")
@virtually
async def test_a_coordinator_asks_for_its_rounds_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: Any = round_ends.RoundEnds(None)  # type: ignore[arg-type]
    looks: list[float] = []
    look = FailsOnce(looks.append)
    look.is_armed = True
    monkeypatch.setattr(ends, "forget_lost", look)
    ends.start()
    await until(lambda: looks)
    await ends.stop()


@breaks("running-rounds")
@virtually
async def test_a_worker_names_its_rounds_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = workers.round_ends.RoundEnds("w", Signer((), "w"))
    ends.begins("127.0.0.1:1", "r")
    told: list[Any] = []
    tell = FailsOnce(lambda: told.append(()))
    tell.is_armed = True
    monkeypatch.setattr(ends._links["127.0.0.1:1"], "tell_running", tell)
    ends.start()
    await until(lambda: told)
    assert told == [()]
    await ends.stop()


@breaks("lease-probe")
@virtually
async def test_the_lease_probe_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    view = ClusterView(MemoryStore(MemoryState()), lease_s=LEASE_S)
    asked: list[Any] = []
    overdue = FailsOnce(lambda: asked.append(None) or [])  # type: ignore[func-returns-value]
    overdue.is_armed = True
    monkeypatch.setattr(view, "overdue", overdue)
    probe = LeaseProbe(view, None, timeout_s=1.0, interval_s=0.01)  # type: ignore[arg-type]
    probe.start()
    await until(lambda: asked)
    await probe.stop()


@breaks("presence")
@virtually
async def test_presence_goes_on_from_where_it_was() -> None:
    endpoint, live = ScriptedEndpoint(), [True]
    is_ready = FailsOnce(lambda: bool(live))
    presence = Presence(DiscoveryEntry(endpoint), is_ready)
    presence.start()
    live.clear()
    await until(lambda: not endpoint.is_registered)
    is_ready.is_armed = True
    await until(lambda: is_ready.has_failed)
    live.append(True)
    await until(lambda: endpoint.is_registered)
    await presence.stop()


@breaks("discovery-entries")
@virtually
async def test_entries_in_discovery_are_written_again() -> None:
    endpoint = ScriptedEndpoint()
    entry = DiscoveryEntry(endpoint)
    await entry.until_listed()
    endpoint.is_registered, endpoint.failures = False, 1
    entries = DiscoveryEntries(lambda: [entry])
    entries.start()
    await until(lambda: endpoint.is_registered)
    assert endpoint.calls == ["enter", "enter"]
    await entries.stop()


@breaks("publisher")
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

    is_idle = False

    def __init__(self) -> None:
        self.change = FailsOnce(self._noted)
        self.asked: list[PoolsSituation] = []

    def _noted(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        self.asked.append(situation)
        return ()


@breaks("pools")
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


@breaks("coordinator-publisher")
@virtually
async def test_a_coordinator_publishes_itself_again() -> None:
    store, read = MemoryStore(MemoryState()), FailsOnce(lambda: CoordinatorView("c1", Slo(1.0, 0.1)))
    read.is_armed = True
    publisher = CoordinatorViewPublisher(store, "c1", read, LEASE_S, interval_s=0.01)
    publisher.start()
    async with asyncio.timeout(PATIENCE_S):
        while not (await store.overview()).coordinators:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert read.has_failed
    await publisher.stop()


class ReleasedKv:
    """A KV exchange that only releases, and notes what."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.release = FailsOnce(self.released.append)

    async def release_session(self, session_id: str) -> int:
        self.release(session_id)
        return 16


@breaks("session-sweeper")
@virtually
async def test_idle_sessions_are_released_again() -> None:
    kv: Any = ReleasedKv()
    kv.release.is_armed = True
    sessions = SessionReleaser(kv, ttl_s=1.0, clock=asyncio.get_running_loop().time)
    for session_id in ("s1", "s2"):
        async with sessions.round(session_id):
            pass
    sweeper = SupervisedTask("session-sweeper", sessions.run)
    sweeper.start()
    await until(lambda: kv.release.has_failed)
    await until(lambda: kv.released == ["s2"])
    await sweeper.stop()


@breaks("session-ends")
@virtually
async def test_ends_of_sessions_are_told_again() -> None:
    told: list[str] = []
    tell = FailsOnce(told.append)
    tell.is_armed = True

    class Store:
        async def end_session(self, session_id: str, **_: Any) -> None:
            tell(session_id)

    store: Any = Store()
    ends = SessionEnds(store, "d1")
    ends.start()
    ends.ended("s1", 1)
    await until(lambda: tell.has_failed)
    await until(lambda: told == ["s1"])
    await ends.stop()


@breaks("kv-rank-")
async def test_the_channel_to_the_engine_reads_on() -> None:
    messages: list[Any] = []
    take = FailsOnce(lambda _rank, message: messages.append(message))
    take.is_armed = True
    links = RankLinks(1, take)
    context: Context = Context()
    engine = context.socket(PAIR)
    engine.connect(links.addresses[0])
    for message in (Hello(0, KvGeometry("", 16, ())), Forgotten(1), Forgotten(2)):
        await engine.send(encode(message))
    await links.hellos(PATIENCE_S)
    await until(lambda: messages)
    assert messages == [Forgotten(2)]
    engine.close(0)
    context.term()
    await links.close()


@breaks("wrong-times")
@virtually
async def test_times_are_looked_at_again() -> None:
    looks: list[float] = []
    look = FailsOnce(looks.append)
    look.is_armed = True

    async def sleep(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        look(delay_s)

    times = CorrectedModel(load_performance_model("tiny-cpu"), Parallelism())
    settings: Any = None
    task = SupervisedTask("wrong-times", partial(warn_of_wrong_times, times, settings, sleep))
    task.start()
    await until(lambda: looks)
    await task.stop()


def test_no_task_is_forgotten() -> None:
    """Each task that the product supervises has a test here or `ELSEWHERE`."""
    assert sorted(names_of_tasks()) == sorted([*TESTS.values(), *ELSEWHERE])
    for task, path in ELSEWHERE.items():
        assert f'"{task} failed; trying again"' in (_ROOT / path).read_text("utf-8"), task


def names_of_tasks() -> Iterator[str]:
    """The names under which the product starts its tasks; of a name with a number its beginning."""
    for path, tree in modules(_ROOT):
        for node in ast.walk(tree):
            match node:
                case ast.Call(ast.Name("SupervisedTask" | "_start_in_background"), [name, *_]):
                    yield from beginning_of(name, path)


def beginning_of(name: ast.expr, path: Path) -> Iterator[str]:
    match name:
        case ast.Constant(str(text)) | ast.JoinedStr([ast.Constant(str(text)), *_]):
            yield text
        case ast.Name("name") if path.name == "component.py":  # `_start_in_background` passes it on
            pass
        case _:
            raise AssertionError(f"{path}:{name.lineno}: the name of a task must be written where it is started")
