"""Loads on a GPU: on which device they are, and what they wait for. A driver that refuses to pin costs only speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from tests.waiting import PATIENCE_S  # noqa: E402
from tests.workers.kv.ranks.copies_lab import BF16, SLOTS, Lab, mha, same_bits, slots_of  # noqa: E402
from workers.kv.ranks.copies import Load, NeighbourStores, PageLoader, pin  # noqa: E402
from workers.kv.shared import NEIGHBOUR_BYTES, StoreMemory  # noqa: E402


class Rank:
    """What a loader works with: the reader, the link and the counter of a rank, which note what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def load(self, _load: Load) -> Iterator[int]:
        self.events.append("begins")
        yield from (0, 1)

    def begin_load(self, _rid: str) -> None: ...

    def loaded(self, rids: list[str], _seconds: float) -> None:
        self.events.append(f"loaded {rids}")

    def update_producer(self) -> int:
        return 7

    def complete(self, index: int, layer: int) -> None:
        self.events.append(f"load {index} layer {layer}")

    def fail(self, _index: int, error: BaseException) -> None:
        self.events.append(repr(error))


def test_a_layer_counts_as_loaded_when_the_ranks_own_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream belongs to the rank's device, which SGLang sets in the scheduler's thread alone."""
    of_thread = threading.local()  # as in CUDA, where each thread begins with device 0
    of_thread.device = 1
    rank: Any = Rank()

    class Stream:
        def __init__(self) -> None:
            self.device = getattr(of_thread, "device", 0)

        def synchronize(self) -> None:
            rank.events.append(f"device {self.device}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    event = SimpleNamespace(record=lambda _stream: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    loader = PageLoader(rank, rank, rank, on_gpu=True, forward_stream=None)
    loader.queue("r", {"kv": ([0], [0])})
    assert loader.start() == 7
    loader.close()
    assert rank.events == ["begins", "device 1", "load 7 layer 0", "device 1", "load 7 layer 1", "loaded ['r']"]


def test_a_load_waits_for_both_streams_in_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    rank: Any = Rank()
    has_started = threading.Event()

    class Event:
        def record(self, stream: str | None) -> None:
            self._stream = stream or "scheduler"

        def synchronize(self) -> None:
            # The scheduler's thread goes on meanwhile. If it waited here, it would wait for itself.
            assert has_started.wait(PATIENCE_S)
            rank.events.append(f"{threading.current_thread().name} waited for {self._stream}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    loader = PageLoader(rank, rank, rank, on_gpu=True, forward_stream="forward")
    loader.queue("r", {"kv": ([0], [0])})
    loader.start()
    has_started.set()
    loader.close()
    assert sorted(rank.events[:2]) == ["ampd-kv-load waited for forward", "ampd-kv-load waited for scheduler"]
    assert rank.events[2:] == ["begins", "load 7 layer 0", "load 7 layer 1", "loaded ['r']"]


def test_a_load_from_a_neighbour_that_outlasts_its_lease_fails_before_its_last_layer() -> None:
    rank: Any = Rank()
    load = rank.load

    def load_late(loads: Load) -> Iterator[int]:
        for layer in load(loads):
            time.sleep(max(0.0, until_s - time.monotonic()) if layer else 0.0)
            yield layer

    rank.load = load_late
    loader = PageLoader(rank, rank, rank, on_gpu=False, forward_stream=None)
    until_s = time.monotonic() + 1.0
    loader.queue("r", {"kv": ([0], [0])})
    loader.queue("r2", {"kv": ([1], [0])}, until_s)
    loader.start()
    loader.close()
    assert rank.events[:2] == ["begins", "load 7 layer 0"]
    assert rank.events[2].startswith("TimeoutError('the lease")
    assert len(rank.events) == 3


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
    copies = lab.copies(buffers, 1, 0)
    lab.store.zero_()
    for _, tensor in slots_of(buffers):
        tensor.zero_()
    stores = NeighbourStores(copies, on_gpu=False)
    assert stores.map(1, memory.place_for_neighbours) == ""
    memory.close()
    list(copies.load({"kv": (SLOTS, [NEIGHBOUR_BYTES + offset for offset in lab.offsets["kv"]])}))
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
