"""What every store promises of the coordinators' own words; on the in-memory twin and on a real Redis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ampd.state.redis_store import StateStore
from ampd.state.store import SessionLimits
from ampd.types import CoordinatorView, ServedWindow, Slo
from tests.ampd.state.contract_lab import HOSTILE_IDS, LONG_S, SHORT_S

FULL = CoordinatorView(
    "f" * 16,
    Slo(0.5, 0.05),
    routing="ampd(alpha=0.9)",
    binding="least-kv",
    pools="static",
    rounds_in_progress=3,
    is_leading=True,
    is_state_heard=False,
    state_losses=2,
    window=ServedWindow(
        span_s=12.5,
        counts={
            "outcome met": 5,
            "output_tokens": 10**12,
            "route local on-time": 5,
            'route remote a "reason"\n': 4,
            "itl -3": 9,
        },
    ),
)


def alone(coordinator_id: str) -> CoordinatorView:
    return CoordinatorView(coordinator_id, Slo(1.0, 0.1))


async def ids(store: StateStore) -> list[str]:
    return sorted(heard.view.coordinator_id for heard in (await store.overview()).coordinators)


async def test_a_view_comes_back_whole_with_its_age(cluster: Any) -> None:
    coordinator, reader = await cluster.store(), await cluster.store()
    await coordinator.publish_coordinator(FULL, LONG_S)
    (heard,) = (await reader.overview()).coordinators
    assert heard.view == FULL
    assert 0 <= heard.age_s < LONG_S


async def test_the_last_word_holds(cluster: Any) -> None:
    store = await cluster.store()
    await store.publish_coordinator(FULL, LONG_S)
    await store.publish_coordinator(replace(FULL, rounds_in_progress=7), LONG_S)
    (heard,) = (await store.overview()).coordinators
    assert heard.view.rounds_in_progress == 7


async def test_leases_run_out_unless_renewed(cluster: Any, waiting: Any) -> None:
    store = await cluster.store()
    await store.publish_coordinator(alone("short"), SHORT_S)
    await store.publish_coordinator(alone("renewed"), SHORT_S)
    await store.publish_coordinator(alone("renewed"), LONG_S)

    async def one_is_left() -> bool:
        return await ids(store) == ["renewed"]

    await waiting.until(one_is_left)


async def test_one_that_leaves_is_gone_at_once_and_may_return(cluster: Any) -> None:
    store = await cluster.store()
    await store.publish_coordinator(alone("a"), LONG_S)
    await store.publish_coordinator(alone("b"), LONG_S)
    await store.remove_coordinator("a")
    await store.remove_coordinator("never there")
    assert await ids(store) == ["b"]
    await store.publish_coordinator(alone("a"), LONG_S)
    assert await ids(store) == ["a", "b"]


async def test_workers_and_coordinators_do_not_mix(cluster: Any, make: Any) -> None:
    store = await cluster.store()
    await store.publish_coordinator(alone("x"), LONG_S)
    await store.publish_worker(make.view("x"), LONG_S)
    overview = await store.overview()
    assert [heard.view for heard in overview.coordinators] == [alone("x")]
    assert [heard.view for heard in overview.workers] == [make.view("x")]
    await store.remove_coordinator("x")
    assert [view.worker_id for view in await store.snapshot()] == ["x"]


async def test_workers_followers_are_not_roused(cluster: Any, waiting: Any) -> None:
    store = await cluster.store()
    watcher = store.watch()
    await watcher.start()
    await store.publish_coordinator(FULL, LONG_S)
    await store.remove_coordinator(FULL.coordinator_id)
    await store.end_session("marker")
    (event,) = await waiting.events(watcher, 1)
    assert event.session_id == "marker"
    await watcher.aclose()


async def test_the_overview_shows_workers_as_the_snapshot_does_with_their_ages(
    cluster: Any, make: Any, waiting: Any
) -> None:
    store = await cluster.store()
    await store.publish_worker(make.view("old"), LONG_S)

    async def has_aged() -> bool:
        (heard,) = (await store.overview()).workers
        return heard.age_s > 0.05

    await waiting.until(has_aged)
    await store.publish_worker(make.view("young"), LONG_S)
    await store.route(make.write(worker_id="old", task_id="t1"), SessionLimits(LONG_S))
    overview = await store.overview()
    assert [(view.worker_id, view.held_tokens, len(view.queue)) for view in await store.snapshot()] == [
        (known.view.worker_id, known.view.held_tokens, len(known.view.queue)) for known in overview.workers
    ]
    # what is laid over a word does not make it younger
    ages = {heard.view.worker_id: heard.age_s for heard in overview.workers}
    assert ages["old"] > ages["young"]


@pytest.mark.parametrize("name", HOSTILE_IDS)
async def test_any_string_is_an_id(cluster: Any, name: str) -> None:
    store = await cluster.store()
    view = replace(FULL, coordinator_id=name, routing=name)
    await store.publish_coordinator(view, LONG_S)
    (heard,) = (await store.overview()).coordinators
    assert heard.view == view
    await store.remove_coordinator(name)
    assert await ids(store) == []
