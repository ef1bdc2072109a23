"""A process looks for its own entries in discovery, and writes those again that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ampd.discovery_entries import DiscoveryEntries, deletes_silent_entries, until_listed
from tests.harness.scripted_endpoint import ScriptedEndpoint
from tests.virtual_time import run_virtually, virtually

LONG_S = 60.0


def entries_of(*endpoints: ScriptedEndpoint, is_wanted: Callable[[], bool] = lambda: True) -> DiscoveryEntries:
    return DiscoveryEntries(
        lambda: [(endpoint, endpoint) for endpoint in endpoints] if is_wanted() else (),
        lambda endpoint: endpoint.register_endpoint_instance(),
    )


@virtually
async def test_only_an_entry_that_is_gone_is_written_again() -> None:
    stays, goes = ScriptedEndpoint(), ScriptedEndpoint()
    entries = entries_of(stays, goes)
    entries.start()
    await asyncio.sleep(LONG_S)
    assert stays.calls == goes.calls == []
    for times in (1, 2):
        goes.is_registered = False
        await asyncio.sleep(LONG_S)
        assert goes.is_registered
        assert goes.calls == ["enter"] * times
    assert stays.calls == []
    await entries.stop()


@virtually
async def test_an_entry_that_is_not_listed_for_a_moment_is_left_alone() -> None:
    endpoint = ScriptedEndpoint()
    entries = entries_of(endpoint)
    entries.start()
    for _ in range(20):
        endpoint.is_registered = False
        await asyncio.sleep(1.0)
        endpoint.is_registered = True
        await asyncio.sleep(1.0)
    assert endpoint.calls == []
    await entries.stop()


@virtually
async def test_a_process_that_wants_none_stays_away() -> None:
    endpoint = ScriptedEndpoint()
    entries = entries_of(endpoint, is_wanted=lambda: False)
    entries.start()
    endpoint.is_registered = False
    await asyncio.sleep(LONG_S)
    assert endpoint.calls == []
    await entries.stop()


@virtually
async def test_what_leaves_while_another_entry_is_written_stays_away() -> None:
    first, second = ScriptedEndpoint(), ScriptedEndpoint()
    wanted = [first, second]

    async def enter(endpoint: ScriptedEndpoint) -> None:
        wanted.clear()
        await endpoint.register_endpoint_instance()

    first.is_registered = second.is_registered = False
    entries = DiscoveryEntries(lambda: [(endpoint, endpoint) for endpoint in wanted], enter)
    entries.start()
    await asyncio.sleep(LONG_S)
    assert (first.calls, second.calls) == (["enter"], [])
    await entries.stop()


@pytest.mark.parametrize("backend", ["file", "etcd"])
def test_the_first_entry_is_written_again_if_others_can_have_deleted_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", backend)

    async def main() -> None:
        endpoint = ScriptedEndpoint()
        endpoint.is_registered = False
        listed = asyncio.create_task(until_listed(endpoint, endpoint, lambda each: each.register_endpoint_instance()))
        await asyncio.sleep(LONG_S)
        assert endpoint.is_registered is listed.done() is (backend == "file")
        assert endpoint.calls == ["enter"] * (backend == "file")
        listed.cancel()

    run_virtually(main(), monkeypatch)


@pytest.mark.parametrize(("backend", "deletes"), [("file", True), ("kubernetes", False), (None, False)])
def test_only_files_are_deleted(backend: str | None, deletes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend is None:
        monkeypatch.delenv("DYN_DISCOVERY_BACKEND", raising=False)
    else:
        monkeypatch.setenv("DYN_DISCOVERY_BACKEND", backend)
    assert deletes_silent_entries() is deletes
