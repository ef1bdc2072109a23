"""The in-memory store against Redis: any sequence of calls has the same outcomes, snapshots and events on both."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import (
    Binding,
    Heard,
    RoleAssigned,
    RouteWrite,
    SessionLimits,
    StateEvent,
    StateRefusedError,
    TaskQueued,
    WorkerUpdated,
)
from ampd.types import CoordinatorView, PrefillTask, Role, Slo, WorkerView
from tests.memory_store import MemoryStore
from tests.waiting import PATIENCE_S

workers = st.sampled_from(["d1", "d2", "p1"])
sessions = st.sampled_from(["s1", "s 2"])
tasks = st.sampled_from(["t1", "t2", "t3"])
epochs = st.integers(0, 4)
tokens = st.integers(0, 3)
leaders = st.sampled_from(["c1", "c2"])
calls = st.lists(
    st.one_of(
        st.tuples(
            st.just("publish"),
            workers,
            st.lists(tasks, unique=True),
            st.dictionaries(sessions, st.integers(1, 9)),
            st.lists(tasks, unique=True),
        ),
        st.tuples(st.just("remove"), workers),
        st.tuples(st.just("finish"), workers, tasks),
        st.tuples(st.just("route"), sessions, workers, epochs, workers, tasks),
        st.tuples(st.just("refresh"), st.lists(st.tuples(sessions, workers, epochs), max_size=3)),
        st.tuples(st.just("rebind"), sessions, workers, epochs, workers),
        st.tuples(st.just("end"), sessions, st.one_of(st.just(""), workers), epochs),
        st.tuples(st.sampled_from(["lead", "resign"]), leaders),
        st.tuples(st.sampled_from(["coordinates", "leaves"]), leaders, tokens),
        st.tuples(st.just("assign"), leaders, workers, st.sampled_from(Role)),
    ),
    max_size=30,
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=calls)
def test_both_stores_agree(redis_server: EmbeddedRedis, calls: list[tuple[Any, ...]]) -> None:
    asyncio.run(compare(redis_server, calls))


async def compare(server: EmbeddedRedis, calls: list[tuple[Any, ...]]) -> None:
    twins: list[StateStore] = [MemoryStore(), await open_store(server.url, uuid.uuid4().hex, timeout_s=PATIENCE_S)]
    watchers = [twin.watch() for twin in twins]
    for watcher in watchers:
        await watcher.start()
    for call in calls:
        answers = [await perform(twin, *call) for twin in twins]
        assert answers[0] == answers[1], call
        pictures = [sorted(map(timeless, await twin.snapshot())) for twin in twins]
        assert pictures[0] == pictures[1], call
        coordinators = [sorted(map(said, (await twin.overview()).coordinators)) for twin in twins]
        assert coordinators[0] == coordinators[1], call
    for twin in twins:
        await twin.end_session("the end")
    seen = [[described(event) async for event in until_the_end(watcher)] for watcher in watchers]
    assert seen[0] == seen[1]
    for watcher in watchers:
        await watcher.aclose()
    for twin in twins:
        await twin.close()


async def perform(store: StateStore, kind: str, *arguments: Any) -> Any:
    match kind, *arguments:
        case "publish", worker_id, queue, held, done:
            own = tuple(task(name) for name in queue)
            view = WorkerView(worker_id, Role.DECODE, queue=own, held_tokens=held)
            return await store.publish_worker(view, 60, done)
        case "remove", worker_id:
            await store.remove_worker(worker_id)
        case "finish", worker_id, task_id:
            await store.finish_tasks(worker_id, [task_id])
        case "route", session_id, worker_id, epoch, queue_worker_id, task_id:
            outcome = await store.route(
                RouteWrite(session_id, worker_id, epoch, queue_worker_id, task(task_id)), SessionLimits(60)
            )
            return outcome, await store.binding(session_id)
        case "refresh", writes:
            routes = [RouteWrite(name, worker_id, epoch, worker_id, None) for name, worker_id, epoch in writes]
            return await store.refresh(routes, SessionLimits(60))
        case "rebind", session_id, worker_id, epoch, target:
            return await store.rebind(Binding(session_id, worker_id, epoch), target, 60)
        case "end", session_id, worker_id, epoch:
            last = Binding(session_id, worker_id, epoch) if worker_id else None
            return await store.end_session(session_id, last=last)
        case "lead", holder:
            lead = await store.lead(holder, 60)
            return lead.leads, lead.assigned_ago_s is None
        case "resign", holder:
            await store.resign(holder)
        case "coordinates", coordinator_id, rounds:
            await store.publish_coordinator(
                CoordinatorView(coordinator_id, Slo(1.0, 0.1), rounds_in_progress=rounds), 60
            )
        case "leaves", coordinator_id, _:
            await store.remove_coordinator(coordinator_id)
        case "assign", holder, worker_id, role:
            return await store.assign_role(holder, RoleAssigned(worker_id, role, "", "test"), 60)
    return None


def task(task_id: str) -> PrefillTask:
    return PrefillTask(task_id, "s", 1, 2, 0.0, Slo(1.0, 0.1), session_missed=task_id == "t1")


def timeless(view: WorkerView) -> tuple[Any, ...]:
    # several tasks entered within a millisecond have no order in Redis
    queue = sorted((task.task_id, task.session_missed) for task in view.queue)
    return view.worker_id, queue, sorted(view.held_tokens.items())


def said(heard: Heard[CoordinatorView]) -> tuple[str, int]:
    return heard.view.coordinator_id, heard.view.rounds_in_progress


def described(event: StateEvent) -> Any:
    match event:
        case WorkerUpdated(view, lease_s):
            return "updated", [task.task_id for task in view.queue], timeless(view), lease_s
        case TaskQueued(worker_id, task):
            return "queued", worker_id, task.task_id
        case _:
            return event


async def until_the_end(watcher: Any) -> Any:
    async for event in watcher:
        yield event
        if getattr(event, "session_id", None) == "the end":
            return


async def test_a_refused_write_keeps_none_of_those_beside_it_back(redis_server: EmbeddedRedis) -> None:
    store = await open_store(redis_server.url, uuid.uuid4().hex, timeout_s=PATIENCE_S)
    broken, moved = (RouteWrite(name, "d1", 1, "d1", None) for name in ("broken", "moved"))
    await store._connection.command("HSET", store._schema.session("broken"), "not", "a string")
    await store.rebind(Binding("moved", "d1", 1), "d2", 60)
    assert await store.refresh([broken, moved], SessionLimits(60)) == [Binding("moved", "d2", 2)]
    with pytest.raises(StateRefusedError, match="WRONGTYPE"):
        await store.refresh([broken], SessionLimits(60))
    await store.close()
