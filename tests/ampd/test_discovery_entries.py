"""A process looks for its own entries in discovery, and writes those again that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ampd.discovery_entries import DiscoveryEntries, deletes_silent_entries
from tests.harness.scripted_endpoint import ScriptedEndpoint
from tests.virtual_time import virtually

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


@pytest.mark.parametrize(("backend", "deletes"), [("file", True), ("kubernetes", False), (None, False)])
def test_only_files_are_deleted(backend: str | None, deletes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend is None:
        monkeypatch.delenv("DYN_DISCOVERY_BACKEND", raising=False)
    else:
        monkeypatch.setenv("DYN_DISCOVERY_BACKEND", backend)
    assert deletes_silent_entries() is deletes
