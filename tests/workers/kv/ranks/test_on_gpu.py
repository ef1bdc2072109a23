"""Copies, pinned memory and streams on a real GPU, and KV from one GPU process to another."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.workers.kv.ranks.copies_lab import FAMILIES, Lab, slots_of  # noqa: E402
from workers.kv.ranks.copies import PageLoader, RankCopies, pin  # noqa: E402
from workers.kv.ranks.pools import attention_buffers, pool_geometry  # noqa: E402
from workers.kv.shared import (  # noqa: E402
    KvGeometry,
    StoreMemory,
    head_share,
)

pytestmark = pytest.mark.gpu

HEADS, DIM, LAYERS, PAGE, PAGES = 8, 128, 36, 16, 160
"""The KV of Qwen3-8B. All pages are 377 MB: several steps, of fewer layers than the model has."""
RECORD_BYTES = 2 * HEADS * DIM * LAYERS * PAGE * 2
SLOTS = list(range(PAGES - 1, 0, -2)) + list(range(0, PAGES, 2))
OFFSETS = [number * RECORD_BYTES for number in range(PAGES)]
SECOND_CYCLES = 2_000_000_000
PATIENCE_S = 60.0


class Rank:
    """The pools of one rank, with KV that depends on the seed only, and its copies."""

    def __init__(self, store: Any, tp: int = 1, rank: int = 0, seed: int = 1) -> None:
        torch.manual_seed(seed)
        share = head_share(HEADS, tp, rank)
        shape = (LAYERS, 2, PAGES * PAGE + PAGE, HEADS, DIM)
        whole = torch.randint(-30000, 30000, shape, dtype=torch.int16, device="cuda").view(torch.bfloat16)
        self.pool = whole[:, :, :, share.first : share.first + share.count].contiguous()
        buffers = attention_buffers(self.pool[:, 0], self.pool[:, 1], PAGE, range(LAYERS))
        geometry = KvGeometry("f", PAGE, (pool_geometry("kv", buffers, {"kv": HEADS}),))
        self.copies = RankCopies(geometry, {"kv": buffers}, store, tp=tp, rank=rank, layers=LAYERS)
        torch.cuda.synchronize()  # a writer's stream does not wait for this one

    def pages(self, layer: int, slots: Sequence[int]) -> Any:
        """K and V of some pages, as bits."""
        pages = self.pool[layer, :, : PAGES * PAGE].unflatten(1, (PAGES, PAGE))
        return pages[:, list(slots)].view(torch.int16)

    def store_and_forget(self) -> None:
        """Write the pages into the store, and zeros into the pool."""
        self.copies.write("kv", SLOTS, OFFSETS)
        self.wanted = [self.pages(layer, SLOTS).clone() for layer in range(LAYERS)]
        self.pool.zero_()
        torch.cuda.synchronize()

    def load(self) -> None:
        self.copies.load({"kv": (SLOTS, OFFSETS)})
        torch.cuda.synchronize()


@contextmanager
def pinned_store() -> Iterator[tuple[StoreMemory, Any]]:
    memory = StoreMemory.create(PAGES * RECORD_BYTES)
    store = torch.frombuffer(memory.map, dtype=torch.uint8)
    assert not pin(store)
    try:
        yield memory, store
    finally:
        assert not int(torch.cuda.cudart().cudaHostUnregister(store.data_ptr()))
        del store
        memory.close()


@pytest.fixture
def store() -> Iterator[Any]:
    with pinned_store() as (_, store):
        yield store


def test_the_driver_knows_the_store_as_pinned(store: Any) -> None:
    assert store.is_pinned()


def test_after_a_refused_pin_the_gpu_computes_on(store: Any) -> None:
    (warning,) = pin(store)  # the second time the driver refuses it
    assert "error 712" in warning
    assert (torch.zeros(4, device="cuda") + 1).sum().item() == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_stores_the_bytes_that_a_cpu_stores(family: str) -> None:
    stores = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        with torch.device(device):
            lab = Lab(*FAMILIES[family]())
            assert {tensor.device.type for _, tensor in slots_of(lab.shard(2, 0))} == {device}
            lab.write(2)
            torch.cuda.synchronize()
        stores.append(lab.store)
    assert stores[0].any()
    assert stores[0].equal(stores[1])


@pytest.mark.parametrize("writers", [1, 4])
@pytest.mark.parametrize("readers", [1, 2])
def test_pages_of_a_real_layout_come_back_at_another_degree(store: Any, writers: int, readers: int) -> None:
    for number in range(writers):
        rank = Rank(store, writers, number)
        rank.copies.write("kv", SLOTS, OFFSETS)
    for number in range(readers):
        rank = Rank(store, readers, number)
        wanted = rank.pool.view(torch.int16).clone()
        rank.pool[:, :, : PAGES * PAGE] = 0
        rank.load()
        assert torch.equal(rank.pool.view(torch.int16), wanted)


def test_a_write_does_not_wait_for_the_engine(store: Any) -> None:
    rank = Rank(store)
    writer = rank.copies
    writer.write("kv", SLOTS, OFFSETS)  # allocates
    store.zero_()
    torch.cuda._sleep(3 * SECOND_CYCLES)
    computed = torch.cuda.Event()
    computed.record()
    writer.write("kv", SLOTS, OFFSETS)
    assert not computed.query()
    copied = store.cuda()
    computed.synchronize()
    rank.pool[:, :, : PAGES * PAGE] = 0
    rank.load()
    writer.write("kv", SLOTS, OFFSETS)
    assert store.cuda().equal(copied)


class Link:
    """The link of a rank: whether the records of a load are free again."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def end_load(self, _rid: str) -> None:
        self.ended.set()

    def loaded(self, _rids: list[str], _seconds: float) -> None: ...


def load_beside(rank: Rank, forward: Any) -> list[bool]:
    """Load, and compute on the stream of the forward; returns whether each layer was right when it was read."""
    link: Any = Link()
    loader = PageLoader(rank.copies, link, forward)
    right = []
    torch.cuda._sleep(SECOND_CYCLES)
    read_before = rank.pages(LAYERS - 1, SLOTS).count_nonzero()
    loader.queue("r", {"kv": (torch.tensor(SLOTS, device="cuda"), OFFSETS)})
    computed = torch.cuda.Event()
    computed.record()
    index = loader.start()
    loader.set_consumer(index)
    with torch.cuda.stream(forward):
        for layer in range(LAYERS):
            loader.wait_until(layer)
            right.append(rank.pages(layer, SLOTS).eq(rank.wanted[layer]).all())
    assert loader.finish(index)
    assert not computed.query(), "the calls waited for the device"
    assert not link.ended.is_set()
    assert link.ended.wait(PATIENCE_S)
    loader.close()
    torch.cuda.synchronize()
    assert not read_before.item()
    return [bool(found) for found in right]


def test_a_load_waits_for_the_readers_of_its_slots_and_its_layers_wait_for_their_bytes(store: Any) -> None:
    rank = Rank(store)
    rank.store_and_forget()
    assert load_beside(rank, torch.cuda.Stream()) == [True] * LAYERS


def test_a_load_waits_for_a_step_on_another_stream_that_still_writes_its_slots(store: Any) -> None:
    """Under SGLang's overlap schedule the stream of the scheduler's thread does not wait for the step."""
    rank = Rank(store)
    rank.store_and_forget()
    forward = torch.cuda.Stream()
    with torch.cuda.stream(forward):
        torch.cuda._sleep(2 * SECOND_CYCLES)
        rank.pool.zero_()
    assert load_beside(rank, forward) == [True] * LAYERS


def _write_as_rank(place: tuple[int, int, int], tp: int, number: int) -> None:
    """A rank's process, as SGLang starts one for each rank."""
    memory = StoreMemory.open(*place)
    store = torch.frombuffer(memory.map, dtype=torch.uint8)
    assert not pin(store)
    Rank(store, tp, number).copies.write("kv", SLOTS, OFFSETS)


def test_processes_pin_and_write_one_store() -> None:
    spawn = multiprocessing.get_context("spawn")
    with pinned_store() as (memory, store):
        ranks = [spawn.Process(target=_write_as_rank, args=(memory.place, 2, number)) for number in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(PATIENCE_S)
            assert process.exitcode == 0
        rank = Rank(store)
        wanted = rank.pool.view(torch.int16).clone()
        rank.pool[:, :, : PAGES * PAGE] = 0
        rank.load()
        assert torch.equal(rank.pool.view(torch.int16), wanted)


def _own_a_store(pipe: Connection) -> None:
    """A worker with the KV of a GPU in its store, which lets another one read."""
    from workers.kv.nixl_transport import NixlTransport

    with pinned_store() as (memory, store):
        for number in range(2):
            Rank(store, 2, number).copies.write("kv", SLOTS, OFFSETS)
        transport = NixlTransport(memory.address, memory.size_bytes)
        transport.let_read(time.monotonic() + PATIENCE_S)
        pipe.send((transport.metadata, memory.address))
        pipe.recv()
        transport.close()


def test_kv_gets_from_a_gpu_to_a_gpu_of_another_process_over_nixl() -> None:
    pytest.importorskip("nixl")
    from workers.kv.nixl_transport import NixlTransport
    from workers.kv.peer_reads import Remote, joined_blocks

    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    owner = spawn.Process(target=_own_a_store, args=(theirs,))
    owner.start()
    with pinned_store() as (memory, store):
        transport = NixlTransport(memory.address, memory.size_bytes)
        assert pipe.poll(PATIENCE_S)
        blocks = joined_blocks([(offset, offset, RECORD_BYTES) for offset in OFFSETS])
        done, _ = transport.read(Remote("owner", *pipe.recv()), *blocks)
        assert done.result(PATIENCE_S) == PAGES * RECORD_BYTES
        transport.close()
        rank = Rank(store)
        wanted = rank.pool.view(torch.int16).clone()
        rank.pool[:, :, : PAGES * PAGE] = 0
        rank.load()
        assert torch.equal(rank.pool.view(torch.int16), wanted)
    pipe.send(None)
    owner.join(PATIENCE_S)
    assert owner.exitcode == 0
