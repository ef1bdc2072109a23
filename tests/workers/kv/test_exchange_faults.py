"""Three stores over real NIXL under hundreds of faults: no page differs from its key, and nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nixl")
pytest.importorskip("msgspec")

from tests.workers.kv.fault_world import FAULTS, World
from workers.kv import engine_store
from workers.kv.peer_reads import PeerReads
from workers.kv.store.directory import Reservation


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within one process UCX would copy at once, and no read would be under way when something happens."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    # Checksums are made in threads, so that writes end in any order.
    monkeypatch.setattr(engine_store, "_AT_ONCE_BYTES", 1 << 16)
    mapped = mappings()
    yield
    gc.collect()
    assert mappings() <= mapped, "the memory of a store is left"


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("ampd-kv-store")


@pytest.mark.slow
async def test_no_fault_of_the_exchange_makes_a_wrong_page_readable_or_leaves_anything_behind() -> None:
    await World(seed=1, has_checksums=False).run(faults=60)


@pytest.mark.slow
@pytest.mark.parametrize("has_checksums", [False, True])
async def test_nor_of_reads_in_place(has_checksums: bool) -> None:
    world = World(seed=2, has_checksums=has_checksums, in_place=True)
    await world.run(faults=60)
    assert world.done["loaded in place"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
async def test_nor_do_many(seed: int) -> None:
    """Without checksums the protocol alone must do it; with them none may fail."""
    await World(seed, has_checksums=bool(seed % 2)).run(faults=300, reads=20, kinds=FAULTS)


def free_at_once(reads: PeerReads, reservation: Reservation, _done: object) -> None:
    """Instead of `_give_up`: the transport may still write there."""
    reads._store.directory.give_up(reservation.id)


@pytest.mark.long
async def test_memory_that_is_freed_under_a_late_read_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerReads, "_give_up", free_at_once)
    with pytest.raises(AssertionError, match="another record"):
        await run_worlds()


async def run_worlds() -> None:
    for seed in range(10):
        await World(seed, has_checksums=False).run(faults=300)
