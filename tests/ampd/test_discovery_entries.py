"""A process looks for its own entries in discovery, and writes those again that are gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ampd.discovery_entries import DiscoveryEntries, DiscoveryEntry, delete_dead, deletes_silent_entries, has_card
from tests.harness.scripted_endpoint import ScriptedEndpoint, SlowEndpoint
from tests.virtual_time import run_virtually, virtually

LONG_S = 60.0


async def entries_of(*endpoints: ScriptedEndpoint, is_wanted: Callable[[], bool] = lambda: True) -> DiscoveryEntries:
    """Looks for the entries of endpoints that have entered."""
    entered = [DiscoveryEntry(endpoint) for endpoint in endpoints]
    for entry in entered:
        await entry.until_listed()
    return DiscoveryEntries(lambda: entered if is_wanted() else ())


@virtually
async def test_only_an_entry_that_is_gone_is_written_again() -> None:
    stays, goes = ScriptedEndpoint(), ScriptedEndpoint()
    entries = await entries_of(stays, goes)
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
    entries = await entries_of(endpoint)
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
    entries = await entries_of(endpoint, is_wanted=lambda: False)
    entries.start()
    endpoint.is_registered = False
    await asyncio.sleep(LONG_S)
    assert endpoint.calls == []
    await entries.stop()


@virtually
async def test_what_leaves_while_another_entry_is_written_stays_away() -> None:
    first, second = SlowEndpoint(), ScriptedEndpoint()
    wanted = [DiscoveryEntry(first), DiscoveryEntry(second)]
    for entry in wanted:
        await entry.until_listed()
    entries = DiscoveryEntries(lambda: wanted)
    first.is_registered = False
    entries.start()
    await asyncio.sleep(LONG_S)  # the first one is being written
    await wanted[1].leave()
    first.may_write.set()
    await asyncio.sleep(LONG_S)
    assert (first.calls, second.calls) == (["enter"], ["leave"])
    await entries.stop()


@virtually
async def test_a_card_that_is_gone_alone_is_written_again() -> None:
    endpoint, cards = ScriptedEndpoint(), ["card"]

    async def write() -> None:
        cards.append("card")

    entry = DiscoveryEntry(endpoint, write, lambda: bool(cards))
    await entry.until_listed()
    entries = DiscoveryEntries(lambda: [entry])
    entries.start()
    cards.clear()
    await asyncio.sleep(LONG_S)
    assert cards == ["card"]
    await entries.stop()


@virtually
async def test_an_entry_that_is_still_written_when_its_endpoint_leaves_goes_too() -> None:
    """Nobody waits for the write any more, but it can still land."""
    endpoint = SlowEndpoint()
    entry = DiscoveryEntry(endpoint)
    entering = asyncio.create_task(entry.enter())
    await asyncio.sleep(LONG_S)
    entering.cancel()
    leaving = asyncio.create_task(entry.unregister_endpoint_instance())
    await asyncio.sleep(LONG_S)
    endpoint.may_write.set()
    await leaving
    await asyncio.sleep(LONG_S)
    assert endpoint.calls == ["enter", "leave"]
    await entry.enter()
    assert endpoint.calls == ["enter", "leave"], "it has left for good"


@pytest.mark.parametrize("backend", ["file", "etcd"])
def test_the_first_entry_is_written_again_if_others_can_have_deleted_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", backend)

    async def main() -> None:
        endpoint = ScriptedEndpoint()
        endpoint.is_registered = False
        listed = asyncio.create_task(DiscoveryEntry(endpoint).until_listed())
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


def test_a_card_is_found_by_the_id_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    assert has_card(0xAB), "there is no folder to write to"
    folder = tmp_path / "v1/mdc"
    folder.mkdir(parents=True)
    assert not has_card(0xAB)
    (folder / "ns%2Fcoordinator%2Fgenerate%2F1ab").write_text("{}")
    assert not has_card(0xAB)
    card = folder / "ns%2Fcoordinator%2Fgenerate%2Fab"
    for text, is_card in (("", False), ('{"type":"Mo', False), ('{"type":"Model"}', True)):
        card.write_text(text)
        assert has_card(0xAB) is is_card, "a full disk leaves a part of it"


async def test_the_entries_of_processes_that_have_died_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    servers = [await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0) for _ in range(2)]
    for kind in ("instances", "mdc"):
        (tmp_path / "v1" / kind).mkdir(parents=True)
        for number, server in enumerate(servers):
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}/x/ns/coordinator/generate"
            file = tmp_path / "v1" / kind / f"ns%2Fcoordinator%2Fgenerate%2F{number}"
            file.write_text(json.dumps({"transport": {"tcp": address}}))
    (tmp_path / "v1/instances/ns%2Fcoordinator%2Fgenerate%2F2").write_text("{")

    def left() -> list[str]:
        return sorted(file.name[-1] for file in tmp_path.glob("v1/*/*"))

    await delete_dead("ns/coordinator/generate")
    assert left() == ["0", "0", "1", "1", "2"]
    servers[1].close()
    await delete_dead("ns/coordinator/generate")
    assert left() == ["0", "0", "2"]
    servers[0].close()
