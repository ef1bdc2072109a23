"""Roles that change: who leads, what the policy is shown and what is assigned, on the in-memory twin and on Redis."""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from ampd.perf.presets import load_performance_model
from ampd.policies.base import PoolsPolicy, PoolsSituation, RoleChange
from ampd.serving.roles import RoleReview
from ampd.state.redis_store import StateStore, Watcher, open_store
from ampd.state.store import RoleAssigned
from ampd.state.view import ClusterView
from ampd.types import Role, Slo, WorkerView
from router.pools import PoolsKeeper
from tests.memory_store import MemoryState, MemoryStore
from tests.virtual_time import run_virtually
from tests.waiting import PATIENCE_S, until
from workers.pending_changes import PendingChanges
from workers.publisher import Publisher
from workers.role import WorkerRole, follow_roles

MODEL = load_performance_model("tiny-cpu")
LEASE_S = 60.0
SHORT_S = 0.15
INTERVAL_S = 0.01


@dataclass
class Script:
    """A pools policy that wants what it is told; it notes what it was shown: roles by worker, and how long ago."""

    wants: list[RoleChange] = field(default_factory=list)
    shown: list[dict[str, str]] = field(default_factory=list)
    since_s: list[float] = field(default_factory=list)
    is_idle: bool = False

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        self.shown.append({view.worker_id: str(view.role) + view.label for view in situation.workers})
        self.since_s.append(situation.now_s - situation.changed_s)
        return tuple(self.wants)


Open = Callable[[], Awaitable[StateStore]]


@pytest.fixture(params=["memory", "redis"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    """Opens handles on one shared state."""
    state, namespace, stores = MemoryState(), uuid.uuid4().hex, []
    url = request.getfixturevalue("redis_server").url if request.param == "redis" else None

    async def open_handle() -> StateStore:
        store: StateStore = await open_store(url, namespace, timeout_s=PATIENCE_S) if url else MemoryStore(state)
        stores.append(store)
        return store

    yield open_handle
    for store in stores:
        await store.close()


@asynccontextmanager
async def replica(opened: Open, policy: PoolsPolicy, lease_s: float = LEASE_S) -> AsyncIterator[PoolsKeeper]:
    """A coordinator's part, not asking yet."""
    store = await opened()
    async with ClusterView(store, lease_s=LEASE_S) as view:
        keeper = PoolsKeeper(
            view, store, RoleReview(policy, MODEL, Slo(1.0, 0.1), random.Random(1)), INTERVAL_S, lease_s, time.monotonic
        )
        try:
            yield keeper
        finally:
            await keeper.stop()


async def publish(store: StateStore, **roles: str) -> None:
    for name, role in roles.items():
        await store.publish_worker(WorkerView(name, Role(role)), LEASE_S)


async def roles(store: StateStore) -> dict[str, RoleAssigned | None]:
    """What each worker is told with its next publication."""
    return {view.worker_id: await store.publish_worker(view, LEASE_S) for view in await store.snapshot()}


async def is_published(store: StateStore, role: Role, label: str = "") -> bool:
    """Whether the only worker publishes this role."""
    return [(view.role, view.label) for view in await store.snapshot()] == [(role, label)]


def to_prefill(worker_id: str, label: str = "") -> RoleChange:
    return RoleChange(worker_id, Role.PREFILL, "busy", label)


async def test_a_prefill_worker_takes_over_when_the_last_owner_of_sessions_is_lost(opened: Open) -> None:
    """At once, whatever the policy says. While the graph starts, the owners may only be late."""
    script, store = Script(), await opened()
    async with replica(opened, script) as keeper:
        await publish(store, p="prefill", q="prefill")
        await until(lambda: len(keeper._view.workers()) == 2)
        await keeper.step()
        assert not keeper.assignments
        await publish(store, d="decode")
        await until(lambda: len(keeper._view.workers()) == 3)
        await keeper.step()
        asked = len(script.shown)
        await store.remove_worker("d")
        await until(lambda: len(keeper._view.workers()) == 2)
        await keeper.step()
        assert keeper.assignments == {(Role.DECODE, "no-owner"): 1}
        assert len(script.shown) == asked
        await keeper.step()
        assert sum(keeper.assignments.values()) == 1
        assert len(script.shown) == asked + 1, "from then on the policy decides again"


async def test_the_leader_alone_asks_and_assigns(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.pools")
    store, first_script, second_script = await opened(), Script([to_prefill("d2", "long")]), Script([to_prefill("d1")])
    await publish(store, d1="decode", d2="decode", p1="prefill")
    async with replica(opened, first_script) as first, replica(opened, second_script) as second:
        for _ in range(3):
            await first.step()
            await second.step()
        assert (first.is_leading, second.is_leading) == (True, False)
        assert first_script.shown[0] == {"d1": "decode", "d2": "decode", "p1": "prefill"}
        assert second_script.shown == []
        assert await roles(store) == {"d1": None, "d2": RoleAssigned("d2", Role.PREFILL, "long", "busy"), "p1": None}
        # Shown as assigned before the worker says so itself; one assignment, one line.
        assert first_script.shown[1]["d2"] == first_script.shown[2]["d2"] == "prefilllong"
        assert first_script.since_s[0] == float("inf")
        assert 0 <= first_script.since_s[2] < PATIENCE_S
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("worker d2: decode -> prefill (busy)") == 1


async def test_a_leader_that_stops_is_replaced_at_once(opened: Open) -> None:
    store, first_script, second_script = await opened(), Script([to_prefill("d1")]), Script()
    await publish(store, d1="decode", d2="decode")
    async with replica(opened, second_script) as second:
        async with replica(opened, first_script) as first:
            first.start()
            await until(lambda: first_script.shown)
            await second.step()
            assert not second.is_leading
        await second.step()
        assert second.is_leading
        # It knows when its predecessor changed a role last.
        assert 0 <= second_script.since_s[0] < PATIENCE_S


async def test_a_leader_that_dies_is_replaced_after_its_lease_and_two_never_act(opened: Open) -> None:
    """The first one hangs between being asked and assigning, as a process that is suspended does."""
    store, first_script, second_script = await opened(), Script([to_prefill("d1")]), Script()
    await publish(store, d1="decode", d2="decode")
    hang, hung = asyncio.Event(), asyncio.Event()
    async with replica(opened, first_script, SHORT_S) as first, replica(opened, second_script, SHORT_S) as second:
        assign = first._store.assign_role

        async def late(*arguments: object) -> bool:
            hung.set()
            await hang.wait()
            return await assign(*arguments)  # type: ignore[arg-type]

        first._store.assign_role = late
        stuck = asyncio.create_task(first.step())
        await hung.wait()
        assert not second_script.shown
        second.start()
        await until(lambda: second.is_leading)
        hang.set()
        await stuck
        assert not first.is_leading
        assert await roles(store) == {"d1": None, "d2": None}


async def test_three_that_ask_all_the_time_assign_what_one_wants(opened: Open) -> None:
    store = await opened()
    await publish(store, **{f"d{index}": "decode" for index in range(4)})
    scripts = [Script([to_prefill(f"d{index}")]) for index in range(3)]
    async with replica(opened, scripts[0]) as a, replica(opened, scripts[1]) as b, replica(opened, scripts[2]) as c:
        for keeper in (a, b, c):
            keeper.start()
        await until(lambda: max(len(script.shown) for script in scripts) > 20)
        assigned = [name for name, role in (await roles(store)).items() if role]
        asked = [f"d{index}" for index, script in enumerate(scripts) if script.shown]
        assert assigned == asked
        assert len(assigned) == 1


async def test_the_last_decode_worker_stays(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    store, script = await opened(), Script([to_prefill("d1"), to_prefill("d2"), to_prefill("unknown")])
    await publish(store, d1="decode", d2="decode", p1="prefill")
    async with replica(opened, script) as keeper:
        for _ in range(3):
            await keeper.step()
        assert [name for name, role in (await roles(store)).items() if role] == ["d1"]
        script.wants.insert(0, RoleChange("p1", Role.DECODE, "swap"))
        await keeper.step()
        assert {name for name, role in (await roles(store)).items() if role} == {"d1", "d2", "p1"}
    said = [record.getMessage() for record in caplog.records if "last" in record.getMessage()]
    assert said == ["pools: worker d2 stays decode (busy): it is the last one"]


async def test_what_the_worker_says_itself_counts_once_it_says_it(opened: Open) -> None:
    store, script = await opened(), Script([to_prefill("d1")])
    await publish(store, d1="decode", d2="decode")
    async with replica(opened, script) as keeper:
        await keeper.step()
        script.wants = []
        await publish(store, d1="prefill")
        await until(lambda: keeper._view.prefill())
        await keeper.step()
        await publish(store, d1="decode")
        await until(lambda: not keeper._view.prefill())
        await keeper.step()
        assert [shown["d1"] for shown in script.shown] == ["decode", "prefill", "decode"]


def test_no_role_changes_while_the_state_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        state = MemoryState(asyncio.get_running_loop().time)

        async def opened() -> StateStore:
            return MemoryStore(state)

        script = Script()
        await publish(await opened(), d1="decode", d2="decode")
        async with replica(opened, script) as keeper:
            keeper.start()
            await until(lambda: script.shown)
            state.lose()
            await until(lambda: not keeper.is_leading)
            count = len(script.shown)
            await asyncio.sleep(10 * INTERVAL_S)
            assert len(script.shown) == count
            state.restore()
            await until(lambda: len(script.shown) > count)

    run_virtually(scenario(), monkeypatch)


def test_a_policy_that_fails_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    good = script.change

    def bad(*_: object) -> Sequence[RoleChange]:
        script.change = good
        raise ZeroDivisionError("policy")

    script.change = bad

    async def scenario() -> None:
        state = MemoryState(asyncio.get_running_loop().time)

        async def opened() -> StateStore:
            return MemoryStore(state)

        await publish(await opened(), d1="decode", d2="decode")
        async with replica(opened, script) as keeper:
            keeper.start()
            await until(lambda: script.shown)

    run_virtually(scenario(), monkeypatch)


def _listening(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once a watcher of roles on `store` has subscribed."""
    watch_roles, listening = store.watch_roles, asyncio.Event()

    def watch() -> Watcher:
        watcher = watch_roles()
        start = watcher.start

        async def started() -> None:
            await start()
            listening.set()

        monkeypatch.setattr(watcher, "start", started)
        return watcher

    monkeypatch.setattr(store, "watch_roles", watch)
    return listening


async def test_a_worker_hears_at_once_and_publishes_its_new_role(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat is 20 s away: only the event can be so quick."""
    store, leader, role = await opened(), await opened(), WorkerRole(Role.DECODE)
    changes = PendingChanges()
    publisher = Publisher(
        store, "d1", lambda: WorkerView("d1", role.role, label=role.label), changes, LEASE_S, 0.025, role.adopt
    )
    await publisher.start()
    listening = _listening(store, monkeypatch)
    hearing = asyncio.create_task(follow_roles(store, "d1", changes.changed))
    await listening.wait()
    await leader.lead("c", LEASE_S)
    for wanted, label in ((Role.PREFILL, "short"), (Role.DECODE, "")):
        assert await leader.assign_role("c", RoleAssigned("d1", wanted, label, "test"), LEASE_S)
        await until(lambda: is_published(leader, wanted, label))  # noqa: B023
    hearing.cancel()
    await asyncio.wait({hearing})
    await publisher.retire()


async def test_a_worker_that_did_not_hear_learns_at_its_heartbeat(opened: Open) -> None:
    store, leader, role = await opened(), await opened(), WorkerRole(Role.DECODE)
    publisher = Publisher(store, "d1", lambda: WorkerView("d1", role.role), PendingChanges(), 0.6, 0.025, role.adopt)
    await publisher.start()
    await leader.lead("c", LEASE_S)
    await leader.assign_role("c", RoleAssigned("d1", Role.PREFILL, "", "test"), LEASE_S)
    await until(lambda: is_published(leader, Role.PREFILL))
    await publisher.retire()
