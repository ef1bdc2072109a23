"""Loads of a rank: how they are started and ended, and of how many copies they consist.

A driver that refuses to pin costs only speed.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from tests.waiting import PATIENCE_S  # noqa: E402
from tests.workers.kv.ranks.copies_lab import BF16, SLOTS, Lab, mha, same_bits, sliding_window, slots_of  # noqa: E402
from workers.kv.ranks import copies  # noqa: E402
from workers.kv.ranks.copies import (  # noqa: E402
    Load,
    NeighbourStores,
    PageLoader,
    Pipeline,
    RankCopies,
    RankSection,
    pin,
)
from workers.kv.ranks.pools import attention_buffers, pool_geometry  # noqa: E402
from workers.kv.shared import NEIGHBOUR_BYTES, KvGeometry, StoreMemory  # noqa: E402


class Rank:
    """The copies and the link of a rank, which note what happens."""

    layers = 2

    def __init__(self, error: Exception | None = None) -> None:
        self.events: list[str] = []
        self.loading = Pipeline(torch.device("cpu"), 1, 0)
        self.error = error

    def load(self, loads: Load, _after: list[Any]) -> list[Any]:
        self.events.append(f"loads {[int(slot) for slot in loads['kv'][0]]} from {loads['kv'][1]}")
        if self.error is not None:
            raise self.error
        return [torch.cpu.Event()] * 3

    def end_load(self, rid: str) -> None:
        self.events.append(f"ends {rid}")

    def loaded(self, rids: list[str], _seconds: float) -> None:
        self.events.append(f"loaded {rids}")


def loader_of(rank: Any) -> PageLoader:
    return PageLoader(rank, rank, None)


def test_queued_loads_are_started_together_and_give_their_records_free() -> None:
    rank = Rank()
    loader = loader_of(rank)
    assert loader.start() == -1
    for number, rid in enumerate(("a", "b", "c")):
        loader.queue(rid, {"kv": ([number], [8 * number])})
    assert loader.cancel("b")
    assert not loader.cancel("d")
    index = loader.start()
    loader.set_consumer(index)
    loader.wait_until(1)
    assert loader.finish(index)
    assert loader.finish(index)  # the second time there is nothing to say
    loader.close()
    assert rank.events == ["ends b", "loads [0, 2] from [0, 16]", "loaded ['a', 'c']", "ends a", "ends c"]


def test_a_load_that_fails_is_told_when_the_pass_was_launched() -> None:
    rank = Rank(KeyError("the neighbour has gone"))
    loader = loader_of(rank)
    loader.queue("r", {"kv": ([0], [0])})
    index = loader.start()
    loader.set_consumer(index)
    loader.wait_until(0)
    assert not loader.finish(index)
    loader.close()
    assert rank.events == ["loads [0] from [0]", "ends r"]


def test_a_load_from_a_neighbour_that_outlasts_its_lease_fails() -> None:
    rank = Rank()
    loader = loader_of(rank)
    loader.queue("r", {"kv": ([0], [0])})
    loader.queue("r2", {"kv": ([1], [0])}, time.monotonic())
    assert not loader.finish(loader.start())
    loader.close()


def test_the_engine_ends_if_it_has_computed_with_a_load_that_outlasted_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes seconds at least, in which the device does nothing."""
    rank, codes = Rank(), list[int]()
    hangs = threading.Event()
    monkeypatch.setattr(os, "_exit", codes.append)
    late = SimpleNamespace(synchronize=lambda: hangs.wait(PATIENCE_S))
    monkeypatch.setattr(rank, "load", lambda *_: [late] * 3)
    clock = SimpleNamespace(monotonic=lambda: 1000.0 * hangs.is_set(), perf_counter=time.perf_counter)
    monkeypatch.setattr(copies, "time", clock)
    loader = loader_of(rank)
    loader.queue("r", {"kv": ([0], [0])}, 999.0)
    assert loader.finish(loader.start())
    assert codes == []
    hangs.set()
    loader.close()
    assert codes == [1]


def test_a_layer_has_landed_with_all_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass as one CUDA graph waits for the last layer only, and other pools' layers may be loaded after it."""
    lab, steps = Lab(*sliding_window(BF16)), itertools.count(1)
    rank = lab.copies(lab.shard(1, 0), 1, 0)
    monkeypatch.setattr(Pipeline, "step", lambda *_: next(steps))
    monkeypatch.setattr(Pipeline, "event", lambda *_: 0)
    *landed, _ = rank.load({pool: (SLOTS, offsets) for pool, offsets in lab.offsets.items()})
    assert landed == [1, 2, 2, 2, 2, 2]


def test_streams_and_scratch_memory_are_made_where_the_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream belongs to the rank's device, which SGLang sets in the scheduler's thread alone."""
    made: list[str] = []

    stream = torch.cpu.Stream

    def made_here(priority: int) -> Any:
        made.append(threading.current_thread().name)
        return stream(priority)

    monkeypatch.setattr(torch.cpu, "Stream", made_here)
    lab = Lab(*mha(4, BF16))
    loaded = lab.copies(lab.shard(1, 0), 1, 0)
    assert made == ["MainThread"] * 4
    thread = threading.Thread(target=loaded.write, args=("kv", SLOTS, lab.offsets["kv"]))
    thread.start()
    thread.join(PATIENCE_S)
    loaded.load({"kv": (SLOTS, lab.offsets["kv"])})
    assert len(made) == 4


QWEN3_32B = {"heads": 8, "head_bytes": 16 * 128 * 2 * 2, "layers": 64}
RECORD_BYTES = math.prod(QWEN3_32B.values())


@dataclass
class Counted:
    """A rank's part of 8,192 tokens of Qwen3-32B at TP 2, whose copies and kernels are counted and not done."""

    copies: list[tuple[int, ...]]
    kernels: list[tuple[int, int]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted([], [])
    monkeypatch.setattr(copies, "copy_rows", lambda into, _source: counted.copies.append(tuple(into.shape)))

    def move(_section: Any, slots: Any, _scratch: Any, _first: int, layers: int, **_: bool) -> None:
        counted.kernels.append((len(slots), layers))

    monkeypatch.setattr(RankSection, "_move", move)
    return counted


def qwen3_32b(pages: int) -> RankCopies:
    pool = torch.empty(1, dtype=torch.bfloat16).expand(pages * 16, 4, 128)
    layers = QWEN3_32B["layers"]
    buffers = attention_buffers([pool] * layers, [pool] * layers, 16, range(layers))
    geometry = KvGeometry("f", 16, (pool_geometry("kv", buffers, {"kv": 8}),))
    assert geometry.page_bytes == RECORD_BYTES
    store = torch.empty(2 * pages * RECORD_BYTES, dtype=torch.uint8, device="meta")
    return RankCopies(geometry, {"kv": buffers}, store, tp=2, rank=1, layers=layers)


@pytest.mark.parametrize("pages", [32, 512, 2048])
def test_a_load_and_a_write_are_few_large_copies(counted: Counted, pages: int) -> None:
    rank = qwen3_32b(pages)
    slots, offsets = list(range(pages)), [number * RECORD_BYTES for number in range(pages)]
    moved_bytes = pages * RECORD_BYTES // 2
    steps = -(-moved_bytes // (64 << 20))
    rank.load({"kv": (slots, offsets)})
    assert len(counted.kernels) == steps
    assert len(counted.copies) <= 4 * steps
    assert pages != 512 or len(counted.copies) + len(counted.kernels) == 80
    assert sum(rows * width for rows, width in counted.copies) == moved_bytes
    assert min(width for _, width in counted.copies) >= 32 << 10
    counted.kernels.clear()
    counted.copies.clear()
    rank.write("kv", slots, offsets)
    assert len(counted.copies) == len(counted.kernels) == -(-moved_bytes // (32 << 20))
    assert sum(rows * width for rows, width in counted.copies) == moved_bytes


def test_copies_of_records_in_any_order_are_as_large_as_a_call_takes(counted: Counted) -> None:
    pages = 512
    offsets = [2 * (pages - number) * RECORD_BYTES - RECORD_BYTES for number in range(pages)]
    qwen3_32b(2 * pages).load({"kv": (list(range(pages)), offsets)})
    assert min(rows * width for rows, width in counted.copies) >= 256 << 10
    assert sum(rows * width for rows, width in counted.copies) == pages * RECORD_BYTES // 2


def test_the_kernel_moves_16_bytes_per_thread() -> None:
    """Compiled for an H100, which needs none."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from workers.kv.ranks import kernels

    pool = torch.empty(2 * 16 * 4 * 128, dtype=torch.bfloat16).view(2 * 16, 4, 128)
    buffers = attention_buffers([pool], [pool], 16, [0])
    _, constants = kernels.launch_of(buffers.sections["kv"][0], 2, 2 * 16 * 128 * 2, 0)
    assert constants["unit"] == 8
    for to_pool in (True, False):
        constexprs = {name: value for name, value in constants.items() if name != "unit"} | {"to_pool": to_pool}
        pointers = {"tensors": "*i64", "slots": "*i64", "scratch": "*i64", "layers": "i32"}
        source = ASTSource(
            kernels._move,
            pointers | dict.fromkeys(constexprs, "constexpr"),
            constexprs,
            {(2,): [["tt.divisibility", 16]]},
        )
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert re.findall(r"(ld|st)\.global\.v2\.b64", code) == ["ld"] * 2 + ["st"] * 2


def test_a_store_that_cannot_be_pinned_is_not_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart, memory, rank = Cudart(801), StoreMemory.create(1 << 20), SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    rank.add_neighbour = lambda number, store: devices.append(-number * len(store))
    stores: Any = NeighbourStores(cast(Any, rank), on_gpu=True)
    assert "error 801" in stores.map(3, memory.place_for_neighbours)
    cudart._result = 0
    assert stores.map(3, memory.place_for_neighbours) == ""
    assert devices == [1, 1, -3 << 20]
    assert [flags for _, _, flags in cudart.asked] == [8, 8]
    assert stores.map(4, (*memory.place_for_neighbours[:1], 999_999, 1, 1)).startswith("[Errno 2]")
    memory.close()


def test_a_neighbours_store_is_mapped_until_it_is_unmapped() -> None:
    lab = Lab(*mha(4, BF16))
    lab.write(1)
    memory = StoreMemory.create(1 << 20)
    memory.map[: len(lab.store)] = lab.store.numpy().tobytes()
    buffers = lab.shard(1, 0)
    loader = lab.copies(buffers, 1, 0)
    lab.store.zero_()
    for _, tensor in slots_of(buffers):
        tensor.zero_()
    stores = NeighbourStores(loader, on_gpu=False)
    assert stores.map(1, memory.place_for_neighbours) == ""
    memory.close()
    loader.load({"kv": (SLOTS, [NEIGHBOUR_BYTES + offset for offset in lab.offsets["kv"]])})
    pairs = zip(slots_of(buffers), slots_of(lab.shard(1, 0)), strict=True)
    assert all(same_bits(ours[SLOTS], theirs[SLOTS]) for (_, ours), (_, theirs) in pairs)
    mapped = stores._memories[1]
    stores.unmap(1)
    stores.unmap(2)
    assert mapped.map.closed


class Cudart:
    """The driver's answer, where there is no GPU."""

    def __init__(self, result: int) -> None:
        self._result = result
        self.asked: list[tuple[int, int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.asked.append((address, size, flags))
        return self._result


@pytest.mark.parametrize(("result", "warnings"), [(0, 0), (2, 1)])
def test_memory_that_is_not_pinned_is_one_warning(monkeypatch: pytest.MonkeyPatch, result: int, warnings: int) -> None:
    cudart, store = Cudart(result), torch.zeros(4096, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    lines = pin(store)
    assert cudart.asked == [(store.data_ptr(), 4096, 0)]
    assert len(lines) == warnings
    assert all("error 2" in line and "ulimit -l" in line and "\n" not in line for line in lines)
