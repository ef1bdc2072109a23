"""A coordinator's view of itself: published in the background, renewed, taken back, and never in the way of rounds."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from ampd.perf.presets import load_performance_model
from ampd.policies import registry
from ampd.state.redis_store import StateStore
from ampd.types import CoordinatorView, Slo
from router.coordinator import Coordinator
from router.coordinator_publisher import CoordinatorViewPublisher, CoordinatorViewReader
from router.policies import CoordinatorPolicies
from router.round_window import RoundWindow
from router.settings import CoordinatorSettings
from tests.memory_store import MemoryState, MemoryStore
from tests.virtual_time import virtually
from tests.waiting import until

VIEW = CoordinatorView("c1", Slo(1.0, 0.1))
LEASE_S = 60.0


async def published(store: StateStore) -> list[CoordinatorView]:
    return [heard.view for heard in (await store.overview()).coordinators]


def counting() -> Callable[[], CoordinatorView]:
    """A view that counts how often it was read."""
    reads = count(1)
    return lambda: replace(VIEW, rounds_in_progress=next(reads))


@virtually
async def test_it_is_published_repeatedly_and_taken_back() -> None:
    store = MemoryStore()
    publisher = CoordinatorViewPublisher(store, "c1", counting(), LEASE_S, interval_s=0.01)
    publisher.start()

    async def published_thrice() -> bool:
        views = await published(store)
        return bool(views) and views[0].rounds_in_progress >= 3

    await until(published_thrice)
    await publisher.stop()
    assert await published(store) == []
    await publisher.stop()


@virtually
async def test_a_lost_state_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    state = MemoryState()
    store = MemoryStore(state)
    reads = counting()
    answers: list[None] = []
    publisher = CoordinatorViewPublisher(
        store, "c1", reads, LEASE_S, interval_s=0.01, on_answer=lambda: answers.append(None)
    )
    state.lose()
    publisher.start()

    async def tried_again() -> bool:
        return store.round_trips.failures["publish_coordinator"] >= 3

    await until(tried_again)
    assert answers == []
    state.restore(empty=True)
    await until(lambda: published(store))
    await until(lambda: answers)
    state.lose()
    await publisher.stop()
    assert caplog.records == []


@virtually
async def test_a_view_that_cannot_be_read_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    store, reads = MemoryStore(), count()

    def read() -> CoordinatorView:
        if next(reads) == 0:
            raise ValueError("not yet")
        return VIEW

    publisher = CoordinatorViewPublisher(store, "c1", read, LEASE_S, interval_s=0.01)
    publisher.start()
    await until(lambda: published(store))
    await publisher.stop()
    assert "trying again" in caplog.text


@virtually
async def test_a_short_lease_is_renewed_in_time() -> None:
    store = MemoryStore()
    publisher = CoordinatorViewPublisher(store, "c1", counting(), lease_s=0.3)
    publisher.start()

    async def renewed() -> bool:
        views = await published(store)
        return bool(views) and views[0].rounds_in_progress >= 4

    await until(renewed)
    await publisher.stop()


@virtually
async def test_a_view_is_read_from_the_coordinator() -> None:
    settings = CoordinatorSettings(model=Path("m"), routing="ampd(alpha=0.8)", binding="least-kv", ttft=0.5, itl=0.05)
    store, window = MemoryStore(), RoundWindow()
    coordinator = Coordinator(
        settings,
        calls=None,  # type: ignore[arg-type]
        store=store,
        policies=CoordinatorPolicies(
            registry.create_named("binding", settings.binding),
            registry.create_named("routing", settings.routing),
            load_performance_model("tiny-cpu"),
        ),
        observers=(window,),
    )
    coordinator.counts.on_add = window.add
    read_view = CoordinatorViewReader("c1", coordinator, settings, window, lambda: 4096)
    assert not read_view().is_state_heard
    await coordinator.start()
    for event in ("bound", "bound", "moved"):
        coordinator.counts.add(event)
    assert read_view().window.counts["bound"] == read_view().window.counts["bound"] == 2
    coordinator.counts.add("bound")
    view = read_view()
    assert (view.window.counts["bound"], view.window.counts["moved"]) == (3, 1)
    assert (view.coordinator_id, view.slo) == ("c1", Slo(0.5, 0.05))
    assert (view.routing, view.binding, view.pools) == ("ampd(alpha=0.8)", "least-kv", "predictive")
    assert (view.rounds_in_progress, view.is_leading, view.is_state_heard) == (0, False, True)
    assert coordinator.counts == {"bound": 3, "moved": 1}
    await coordinator.stop()
