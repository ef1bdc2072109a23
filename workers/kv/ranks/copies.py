"""Copies between the device pools of one rank and the records of its worker's store: on the host, and from a GPU.

A rank writes and loads only the heads that it holds. They are contiguous in a record, because the layers of a head
follow each other there; see `workers.kv.shared`. Both run beside what the engine computes: loads layer by layer on a
thread of their own, and writes on a stream.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from queue import Queue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from workers.kv.ranks.link import RankLink
from workers.kv.ranks.pools import PoolBuffers, head_bytes
from workers.kv.shared import (
    NEIGHBOUR_BYTES,
    KvGeometry,
    Place,
    PoolGeometry,
    Section,
    Share,
    StoreMemory,
    head_share,
)

log = logging.getLogger(__name__)

_COPY_BYTES = 256 << 10
"""What one copy between host and GPU should move at least: 256 KB take as long over PCIe as the call itself."""
_SCRATCH_BYTES = 64 << 20
"""GPU memory in which the KV of some records waits between the pool and the store."""
_READ_ONLY = 8
"""`cudaHostRegisterReadOnly`: for memory that the process cannot write."""
_ALIGNMENT = 8
"""Every record starts at a multiple of this, so that all numbers in it are aligned."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of bits. A copy of floats through them cannot change a bit."""


class RankSection:
    """A section of a pool's records as one rank sees it.

    Attributes:
        share: the heads of this rank.
        start: the byte of a record at which they start.
        layers: for each layer of the pool, tensors [slot, head, ...] whose bytes follow each other for each head.

    Raises:
        ValueError: the tensors do not fit the section.
    """

    def __init__(self, pool: PoolGeometry, section: Section, layers: Sequence[Sequence[Tensor]], share: Share) -> None:
        self.share = share
        self.heads = section.heads
        self.head_bytes = section.head_bytes
        self.block_bytes = section.block_bytes
        self.record_bytes = pool.record_bytes
        self.start = pool.starts()[section.name] + share.first * section.block_bytes
        self.layers = [[tensor.view(_INTEGERS[tensor.element_size()]) for tensor in tensors] for tensors in layers]
        if len(layers) != section.layers:
            raise ValueError(f"KV pool {pool.name}: {len(layers)} layers of buffers, {section.layers} in a record")
        wanted = (share.count, section.head_bytes)
        for tensors in layers:
            found = (int(tensors[0].shape[1]), sum(head_bytes(tensor) for tensor in tensors))
            if found != wanted:
                raise ValueError(
                    f"KV pool {pool.name}: buffers of {found[0]} heads and {found[1]} bytes per head and layer do not "
                    f"fit section {section.name} ({wanted[0]} heads on this rank, {wanted[1]} bytes)"
                )

    def part_starts(self) -> list[int]:
        """The byte of a head's layer at which each tensor of the layer starts."""
        sizes = [head_bytes(tensor) for tensor in self.layers[0]]
        return [sum(sizes[:number]) for number in range(len(sizes))]


class Stores:
    """The stores that a rank maps: its worker's own, which is number 0, and those of neighbours."""

    def __init__(self, own: Tensor) -> None:
        self._bytes = {0: own}

    def add(self, number: int, memory: Tensor) -> None:
        """Add the store of a neighbour."""
        self._bytes[number] = memory

    def remove(self, number: int) -> Tensor | None:
        """Take the store of a neighbour away; None: it is not here."""
        return self._bytes.pop(number, None)

    def at(self, offset: int) -> tuple[Tensor, int]:
        """The store in which an offset lies, and its place there. Raises `KeyError` if the neighbour has gone."""
        number, place = divmod(offset, NEIGHBOUR_BYTES)
        return self._bytes[number], place

    def part(self, offset: int, size_bytes: int) -> Tensor:
        """Bytes of one store; raises as `at`."""
        memory, place = self.at(offset)
        return memory[place : place + size_bytes]


class HostCopies:
    """Copies within host memory, through NumPy, whose calls cost a tenth of torch's.

    Each layer of neighbouring slots and records is one copy. Its items are as many bytes as are contiguous on both
    sides: a head's vector of one token, for example.
    """

    def __init__(self, section: RankSection, stores: Stores) -> None:
        self.section = section
        self._stores = stores
        self._starts = section.part_starts()
        self._arrays = [[_as_items(tensor) for tensor in tensors] for tensors in section.layers]

    def write(self, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy this rank's heads of device slots to the records at `offsets`."""
        for at, records in self._views(slots, offsets):
            for layer, arrays in enumerate(self._arrays):
                for array, record in zip(arrays, records, strict=True):
                    record[:, :, layer] = array[at]

    def loader(self, slots: Sequence[int], offsets: Sequence[int]) -> Callable[[int], None]:
        """A function that copies one layer of records to device slots."""
        views = list(self._views(slots, offsets))

        def load(layer: int) -> None:
            for at, records in views:
                for array, record in zip(self._arrays[layer], records, strict=True):
                    array[at] = record[:, :, layer]

        return load

    def _views(self, slots: Sequence[int], offsets: Sequence[int]) -> Iterator[tuple[slice, list[Any]]]:
        """Neighbouring slots, and for each part their records as [record, head of this rank, layer, ...]."""
        section = self.section
        for slot, offset, count in _runs(slots, offsets, section.record_bytes):
            store, place = self._stores.at(offset)
            memory, records = store.numpy(), []
            for array, start in zip(self._arrays[0], self._starts, strict=True):
                inner = array.shape[2:]
                shape = (count, section.share.count, len(self._arrays), *inner)
                strides = (section.record_bytes, section.block_bytes, section.head_bytes)
                at = place + section.start + start
                width = array.dtype.itemsize
                inside = tuple(width * math.prod(inner[axis + 1 :]) for axis in range(len(inner)))
                records.append(np.ndarray(shape, array.dtype, memory, at, strides + inside))
            yield slice(slot, slot + count), records


class GpuCopies:
    """Copies between a GPU and pinned host memory, through scratch memory on the GPU.

    Kernels gather and scatter on the GPU, so that what crosses PCIe is contiguous on both sides. All of it runs on the
    caller's current stream.
    """

    def __init__(
        self, section: RankSection, stores: Stores, scratch_bytes: int = _SCRATCH_BYTES, copy_bytes: int = _COPY_BYTES
    ) -> None:
        self.section = section
        self._stores = stores
        self._starts = section.part_starts()
        self._scratch_bytes = scratch_bytes
        self._group = max(1, copy_bytes // section.head_bytes)

    def write(self, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy this rank's heads of device slots to the records at `offsets`."""
        section = self.section
        width = section.share.count * section.block_bytes
        for at, some_offsets, scratch in self._batches(slots, offsets, width):
            for layer, tensors in enumerate(section.layers):
                for tensor, view in zip(tensors, self._views(scratch, len(section.layers), layer), strict=True):
                    view.copy_(tensor[at])
            for number, offset in enumerate(some_offsets):
                self._stores.part(offset + section.start, width).copy_(scratch[number], non_blocking=True)

    def loader(self, slots: Sequence[int], offsets: Sequence[int]) -> Callable[[int], None]:
        """A function that copies records to device slots, in groups of layers: all of a group with its first layer."""
        section = self.section

        def load(layer: int) -> None:
            if layer % self._group:
                return
            group = section.layers[layer : layer + self._group]
            block = len(group) * section.head_bytes
            for at, some_offsets, scratch in self._batches(slots, offsets, section.share.count * block):
                for into, offset in zip(scratch, some_offsets, strict=True):
                    self._fill(into, offset + section.start + layer * section.head_bytes, block)
                for number, tensors in enumerate(group):
                    for tensor, view in zip(tensors, self._views(scratch, len(group), number), strict=True):
                        tensor[at] = view

        return load

    def _fill(self, into: Tensor, start: int, block: int) -> None:
        """Copy blocks of each head to scratch memory: in one piece if they are all of the head's layers."""
        section = self.section
        if block == section.block_bytes:
            into.copy_(self._stores.part(start, into.numel()), non_blocking=True)
            return
        for head, part in enumerate(into.view(section.share.count, block)):
            part.copy_(self._stores.part(start + head * section.block_bytes, block), non_blocking=True)

    def _views(self, scratch: Tensor, layers: int, layer: int) -> Iterator[Tensor]:
        """For each part of a layer, scratch memory [record, head and layer's bytes] as [record, head, ...]."""
        heads = scratch.view(scratch.shape[0], self.section.share.count, layers, -1)[:, :, layer]
        for tensor, start in zip(self.section.layers[layer], self._starts, strict=True):
            bits = heads[:, :, start : start + head_bytes(tensor)].view(tensor.dtype)
            yield bits.unflatten(2, tuple(tensor.shape[2:]))

    def _batches(
        self, slots: Sequence[int], offsets: Sequence[int], width: int
    ) -> Iterator[tuple[Tensor, Sequence[int], Tensor]]:
        """Batches that fit into scratch memory: slots as an index on the device, offsets, scratch memory for them."""
        device = self.section.layers[0][0].device
        records = max(1, self._scratch_bytes // width)
        for first in range(0, len(slots), records):
            at = torch.tensor(list(slots[first : first + records]), dtype=torch.int64, device=device)
            yield at, offsets[first : first + records], torch.empty((len(at), width), dtype=torch.uint8, device=device)


def _as_items(tensor: Tensor) -> Any:
    """A tensor [slot, head, ...] as an array of the same memory, with items of as many bytes as are contiguous."""
    itemsize = int(tensor.element_size())
    shape = [int(size) for size in tensor.shape]
    strides = [int(stride) * itemsize for stride in tensor.stride()]
    while len(shape) > 2 and (shape[-1] == 1 or strides[-1] == itemsize):
        itemsize *= shape.pop()
        strides.pop()
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    start = int(tensor.storage_offset()) * int(tensor.element_size())
    return np.ndarray(tuple(shape), f"V{itemsize}", memory, start, tuple(strides))


def _runs(slots: Sequence[int], offsets: Sequence[int], record_bytes: int) -> list[tuple[int, int, int]]:
    """Slots that are neighbours and whose records are neighbours: first slot, first offset, count."""
    slot, offset = np.asarray(slots, dtype=np.int64), np.asarray(offsets, dtype=np.int64)
    if not len(slot):
        return []
    breaks = np.flatnonzero((np.diff(slot) != 1) | (np.diff(offset) != record_bytes)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(slot)])))
    return list(zip(slot[starts].tolist(), offset[starts].tolist(), lengths.tolist(), strict=True))


class RankCopies:
    """The copies of one rank.

    Args:
        buffers: by pool.
        store: the whole mapping of the store, one dimension of bytes. For a GPU it must be pinned.
        layers: of the model.

    Raises:
        ValueError: the buffers do not fit the geometry.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        buffers: Mapping[str, PoolBuffers],
        store: Tensor,
        *,
        tp: int,
        rank: int,
        layers: int,
    ) -> None:
        self._layers = layers
        self._stores = Stores(store)
        self._loading = threading.Lock()
        self._copies: dict[str, list[HostCopies | GpuCopies]] = {}
        self._of_layer: list[list[tuple[str, int]]] = [[] for _ in range(layers)]
        for pool in geometry.pools:
            name = pool.name
            tensors, layer_ids = buffers[name].sections, buffers[name].layer_ids
            self._copies[name] = [
                _copies(
                    RankSection(pool, section, tensors[section.name], head_share(section.heads, tp, rank)),
                    self._stores,
                )
                for section in pool.sections
            ]
            for index, layer in enumerate(layer_ids):
                self._of_layer[layer].append((name, index))

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy slots of the device (pages, or states) to the records at `offsets`, on the caller's stream.

        Only the heads that this rank writes are copied. On a GPU the copies have ended when the stream gets there.
        """
        _check(slots, offsets)
        for copies in self._copies[pool]:
            if copies.section.share.writes:
                copies.write(slots, offsets)

    def load(self, loads: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> Iterator[int]:
        """Copy records to slots of the device, on the caller's stream.

        Args:
            loads: by pool, slots and offsets.

        Yields:
            Each layer of the model, in order. On a GPU the layer's copies are then on the stream, not yet done.
        """
        for slots, offsets in loads.values():
            _check(slots, offsets)
        with self._loading:
            loaders = {pool: [copies.loader(*loads[pool]) for copies in self._copies[pool]] for pool in loads}
            for layer in range(self._layers):
                for pool, index in self._of_layer[layer]:
                    for load in loaders.get(pool, ()):
                        load(index)
                yield layer

    def add_neighbour(self, number: int, memory: Tensor) -> None:
        """Let loads read the store of a neighbour; for a GPU it must be pinned."""
        self._stores.add(number, memory)

    def remove_neighbour(self, number: int) -> Tensor | None:
        """Let the loads from a neighbour that run end. Later ones raise `KeyError`."""
        with self._loading:
            return self._stores.remove(number)


def _copies(section: RankSection, stores: Stores) -> HostCopies | GpuCopies:
    on_host = section.layers[0][0].device.type == "cpu"
    return HostCopies(section, stores) if on_host else GpuCopies(section, stores)


def _check(slots: Sequence[int], offsets: Sequence[int]) -> None:
    if len(slots) != len(offsets) or any(offset % _ALIGNMENT for offset in offsets):
        raise ValueError(f"{len(slots)} slots, {len(offsets)} records; each starts at a multiple of {_ALIGNMENT} bytes")


# -- beside what the engine computes


Load = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""By pool: slots on the device, and offsets in the store."""


class LoadCounter(Protocol):
    """What SGLang waits on, layer by layer."""

    def update_producer(self) -> int: ...

    def complete(self, index: int, layer: int) -> None: ...

    def fail(self, index: int, error: BaseException) -> None: ...

    def finish(self, index: int) -> bool: ...


class PageLoader:
    """The loads of one rank: queued by request, started together for one forward pass.

    Made in the scheduler's thread: a stream belongs to the current device of the thread that makes it, and only there
    SGLang has set the rank's device.

    Args:
        link: protects the records of a request while they are read.
        forward_stream: on a GPU, the stream on which SGLang computes under its overlap schedule.
    """

    def __init__(
        self, reader: RankCopies, link: RankLink, counter: LoadCounter, *, on_gpu: bool, forward_stream: Any
    ) -> None:
        self._reader = reader
        self._link = link
        self._counter = counter
        self._stream = torch.cuda.Stream() if on_gpu else None
        self._forward_stream = forward_stream
        self._queued: dict[str, tuple[Load, float]] = {}
        self._started: dict[int, list[str]] = {}
        self._jobs: Queue[tuple[int, dict[str, tuple[Load, float]], list[Any]] | None] = Queue()
        self._thread = threading.Thread(target=self._run, name="ampd-kv-load", daemon=True)
        self._thread.start()

    def queue(self, rid: str, load: Load, until_s: float = math.inf) -> None:
        """Queue a request's load, which has begun at the link. `until_s`: it fails if it has not ended then."""
        self._queued[rid] = load, until_s

    def cancel(self, rid: str) -> bool:
        """Take a queued load back; False if there is none."""
        if self._queued.pop(rid, None) is None:
            return False
        self._link.end_load(rid)
        return True

    def start(self) -> int:
        """Start all queued loads. Returns the counter's index, or -1 if nothing is queued."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        index = self._counter.update_producer()
        self._started[index] = list(queued)
        self._jobs.put((index, queued, self._ready()))
        return index

    def finish(self, index: int) -> bool:
        """End the loads that were started under `index`; returns whether all of them have landed."""
        landed = self._counter.finish(index)
        for rid in self._started.pop(index, ()):
            self._link.end_load(rid)
        return landed

    def reset(self) -> None:
        """Forget queued loads and end started ones."""
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._started):
            self.finish(index)

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join(10.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            index, loads, ready = job
            try:
                for event in ready:
                    event.synchronize()
                started_s = time.perf_counter()
                merged = _merged([load for load, _ in loads.values()])
                self._copy(index, merged, min(until_s for _, until_s in loads.values()))
                self._link.loaded(list(loads), time.perf_counter() - started_s)
            except BaseException as error:
                log.exception("KV load failed")
                self._counter.fail(index, error)

    def _copy(self, index: int, load: Load, until_s: float) -> None:
        stream = self._stream
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for layer in self._reader.load(load):
                if stream is not None:
                    stream.synchronize()
                if time.monotonic() >= until_s:
                    raise TimeoutError("the lease on records of a neighbour has ended before they were loaded")
                self._counter.complete(index, layer)

    def _ready(self) -> list[Any]:
        """Events after which the slots may be written: what was launched before may still read and write them.

        A request that ends by a stop token or an abort gives its last page back while the next step, which was launched
        before the end was known, still writes a token into that page. The stream of this thread does not wait for the
        end of the step. It cannot take long, because the step needs nothing of the load.
        """
        if self._stream is None:
            return []
        events = [torch.cuda.Event(), torch.cuda.Event()]
        for event, stream in zip(events, (None, self._forward_stream), strict=True):  # None: the stream of this thread
            event.record(stream)
        return events


def _merged(loads: Sequence[Load]) -> Load:
    merged: dict[str, tuple[list[int], list[int]]] = {}
    for load in loads:
        for pool, (slots, offsets) in load.items():
            all_slots, all_offsets = merged.setdefault(pool, ([], []))
            all_slots += slots
            all_offsets += offsets
    return merged


class StreamWriter:
    """Copies pages into the store on a stream of its own.

    Made in the scheduler's thread, like `PageLoader`, and for the same reason.
    """

    def __init__(self, copies: RankCopies, *, on_gpu: bool) -> None:
        self._copies = copies
        self._stream = torch.cuda.Stream() if on_gpu else None

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Returns when the copy has ended."""
        if self._stream is None:
            self._copies.write(pool, slots, offsets)
            return
        with torch.cuda.stream(self._stream):
            self._copies.write(pool, slots, offsets)
        self._stream.synchronize()


class NeighbourStores:
    """Maps the stores of neighbours for the loads of one rank, and pins them on a GPU.

    Made in the scheduler's thread, like `PageLoader`, and for the same reason.
    """

    def __init__(self, copies: RankCopies, *, on_gpu: bool) -> None:
        self._copies = copies
        self._device = torch.cuda.current_device() if on_gpu else None
        self._memories: dict[int, StoreMemory] = {}

    def map(self, number: int, place: Place) -> str:
        """Map a store. Returns why that is not possible, in one line; empty: it is mapped."""
        try:
            memory = StoreMemory.of_neighbour(*place)
        except (OSError, ValueError) as error:
            return str(error)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that cannot be written
            store = torch.frombuffer(memory.map, dtype=torch.uint8)
        refusal: list[str] = []
        if self._device is not None:
            torch.cuda.set_device(self._device)
            refusal = pin(store, _READ_ONLY)
        if refusal:
            del store
            memory.close()
            return refusal[0]
        self._memories[number] = memory  # the tensor does not keep the mapping
        self._copies.add_neighbour(number, store)
        return ""

    def unmap(self, number: int) -> None:
        """Let a mapping go, after the loads from it that run."""
        store = self._copies.remove_neighbour(number)
        if store is None:
            return
        if self._device is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.cudart().cudaHostUnregister(store.data_ptr())
        self._memories.pop(number).close()


def pin(store: torch.Tensor, flags: int = 0) -> list[str]:
    """Pin a store's memory, so that copies from and to the GPU run beside the computation.

    Returns a warning if the driver refuses it.
    """
    result = int(torch.cuda.cudart().cudaHostRegister(store.data_ptr(), store.numel(), flags))
    if not result:
        return []
    _forget_error()
    return [
        f"its memory was not pinned for the GPU (cudaHostRegister: error {result}), so that copies between store and "
        "device are slower and hold up the engine; raise the limit of locked memory (ulimit -l, or LimitMEMLOCK of the "
        "container runtime), or make the store smaller (--kv-store-gib)"
    ]


def _forget_error() -> None:
    """Let a call of torch report the error that the driver still has. Otherwise the engine's next kernel fails with it.

    torch does not expose `cudaGetLastError`. It calls it after each kernel that it starts.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
