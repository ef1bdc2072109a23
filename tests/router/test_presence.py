"""A coordinator enters discovery with the first live decode worker and leaves with the last, even if a change fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ampd.discovery_entries import DiscoveryEntry
from router.presence import Presence
from tests.harness.scripted_endpoint import ScriptedEndpoint, SlowEndpoint
from tests.virtual_time import run_virtually
from tests.waiting import until

LONG_S = 60.0
Scenario = Callable[[ScriptedEndpoint, list[str], Presence], Awaitable[None]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    """Runs a scenario with an endpoint, the live decode workers (none yet) and a presence that follows them."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            live: list[str] = []
            endpoint = ScriptedEndpoint()
            presence = Presence(DiscoveryEntry(endpoint), lambda: bool(live))
            await scenario(endpoint, live, presence)
            await presence.stop()

        run_virtually(main(), monkeypatch)

    return run


def test_it_waits_for_the_first_decode_worker_and_then_follows(run: Callable[[Scenario], None]) -> None:
    async def scenario(endpoint: ScriptedEndpoint, live: list[str], presence: Presence) -> None:
        ready = asyncio.create_task(presence.until_ready())
        await asyncio.sleep(LONG_S)
        assert not ready.done()
        live.append("d1")
        assert await ready
        endpoint.is_registered = False  # Dynamo registers an endpoint some time after it is served
        presence.start()
        await asyncio.sleep(LONG_S)
        endpoint.is_registered = True
        for _ in range(2):
            live.clear()
            await asyncio.sleep(LONG_S)
            assert not endpoint.is_registered
            assert presence.wanted_entries() == []
            live.append("d2")
            await asyncio.sleep(LONG_S)
            assert endpoint.is_registered
            assert presence.wanted_entries()
        assert endpoint.calls == ["leave", "enter"] * 2

    run(scenario)


@pytest.mark.parametrize("is_failure_late", [False, True])
def test_a_change_that_fails_is_tried_again(
    run: Callable[[Scenario], None], is_failure_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(endpoint: ScriptedEndpoint, live: list[str], presence: Presence) -> None:
        endpoint.is_failure_late = is_failure_late
        live.append("d1")
        presence.start()
        await asyncio.sleep(LONG_S)
        for workers, calls in (([], "leave"), (["d1"], "enter")):
            endpoint.calls.clear()
            endpoint.failures = 2
            live[:] = workers
            await asyncio.sleep(LONG_S)
            assert endpoint.is_registered == bool(workers)
            # What took effect in spite of its error is not repeated: Dynamo refuses to leave twice.
            assert endpoint.calls == [calls] * (1 if is_failure_late else 3)

    run(scenario)
    failures = [record for record in caplog.records if record.getMessage().startswith("could not change the presence")]
    assert len(failures) == (2 if is_failure_late else 4)


def test_a_change_of_mind_while_it_fails_ends_as_it_should(run: Callable[[Scenario], None]) -> None:
    async def scenario(endpoint: ScriptedEndpoint, live: list[str], presence: Presence) -> None:
        endpoint.failures, endpoint.is_failure_late = 1, True
        live.append("d1")
        presence.start()
        await asyncio.sleep(LONG_S)
        live.clear()
        await until(lambda: not endpoint.is_registered)
        live.append("d1")  # it left, but believes that it did not
        await asyncio.sleep(LONG_S)
        assert endpoint.is_registered

    run(scenario)


def test_what_leaves_for_good_does_not_come_back(run: Callable[[Scenario], None]) -> None:
    async def scenario(endpoint: ScriptedEndpoint, live: list[str], presence: Presence) -> None:
        live.append("d1")
        presence.start()
        await asyncio.sleep(LONG_S)
        await presence.unregister_endpoint_instance()
        await asyncio.sleep(LONG_S)
        assert not endpoint.is_registered
        assert not await presence.until_ready()

    run(scenario)


def test_what_never_entered_need_not_leave(run: Callable[[Scenario], None]) -> None:
    async def scenario(endpoint: ScriptedEndpoint, live: list[str], presence: Presence) -> None:
        ready = asyncio.create_task(presence.until_ready())
        await asyncio.sleep(LONG_S)
        await presence.unregister_endpoint_instance()
        live.append("d1")
        assert not await ready
        assert endpoint.calls == []

    run(scenario)


def test_it_enters_in_its_own_way_where_others_may_have_deleted_more_than_the_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        live, endpoint, cards = ["d1"], ScriptedEndpoint(), list[str]()

        async def enter() -> None:
            cards.append("card")
            await endpoint.register_endpoint_instance()

        presence = Presence(DiscoveryEntry(endpoint, enter), lambda: bool(live))
        presence.start()
        await asyncio.sleep(LONG_S)
        assert cards == []
        live.clear()
        await asyncio.sleep(LONG_S)
        live.append("d2")
        await asyncio.sleep(LONG_S)
        assert cards == ["card"]
        assert endpoint.is_registered
        await presence.stop()

    run_virtually(main(), monkeypatch)


@pytest.mark.parametrize("is_for_good", [False, True])
def test_an_entry_that_is_being_written_again_goes_too(is_for_good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        live, endpoint = ["d1"], SlowEndpoint()
        presence = Presence(DiscoveryEntry(endpoint), lambda: bool(live))
        presence.start()
        await until(presence.wanted_entries)
        (entry,) = presence.wanted_entries()
        entering = asyncio.create_task(entry.enter_again())
        await asyncio.sleep(LONG_S)
        live.clear()
        leaving = asyncio.create_task(presence.unregister_endpoint_instance()) if is_for_good else None
        await asyncio.sleep(LONG_S)
        endpoint.may_write.set()
        await entering
        await asyncio.sleep(LONG_S)
        assert endpoint.calls == ["enter", "leave"]
        await entry.enter_again()
        assert endpoint.calls == ["enter", "leave"]
        if leaving:
            await leaving
        await presence.stop()

    run_virtually(main(), monkeypatch)


def test_what_stood_still_while_it_was_first_served_enters_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")

    async def main() -> None:
        endpoint, cards = ScriptedEndpoint(), list[str]()
        endpoint.is_registered = False

        async def enter() -> None:
            cards.append("card")
            await endpoint.register_endpoint_instance()

        presence = Presence(DiscoveryEntry(endpoint, enter), lambda: True)
        presence.start()
        await asyncio.sleep(LONG_S)
        assert cards == ["card"]
        assert presence.wanted_entries()
        await presence.stop()

    run_virtually(main(), monkeypatch)


def test_what_is_still_being_entered_for_the_first_time_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")

    async def main() -> None:
        endpoint = SlowEndpoint()
        endpoint.is_registered = False
        presence = Presence(DiscoveryEntry(endpoint), lambda: True)
        presence.start()
        await asyncio.sleep(LONG_S)  # it stood still, and writes its entry again
        leaving = asyncio.create_task(presence.unregister_endpoint_instance())
        await asyncio.sleep(LONG_S)
        endpoint.may_write.set()
        await leaving
        await asyncio.sleep(LONG_S)
        assert endpoint.calls == ["enter", "leave"]

    run_virtually(main(), monkeypatch)
