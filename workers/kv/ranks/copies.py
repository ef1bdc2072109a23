"""Copies between the device pools of one rank and the records of its worker's store, through scratch memory.

A rank writes and loads only the heads that it holds. They are contiguous in a record, because the layers of a head
follow each other there; see `workers.kv.shared`. What crosses the link are few large copies of rows. Kernels move the
KV between scratch memory and the slots. Copies and kernels have streams of their own, and wait for each other by
events, so that no thread of the engine waits for a load. On a CPU each operation has ended when the call that begins it
returns.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from queue import Queue
from typing import Any

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

_LOAD_BYTES, _WRITE_BYTES = 64 << 20, 32 << 20
"""Scratch memory on the device, of each of the two halves: the first layers of a load are there when one is full."""
_ROW_BYTES = 32 << 10
"""What a row of a copy has at least, where it can: shorter ones do not fill the link."""
_COPY_BYTES = 256 << 10
"""What a copy moves at least, where it can: 256 KB take as long over PCIe as the call itself."""
_PITCH_BYTES = (1 << 31) - 1
"""The longest distance of two rows that a copy can have."""
_LEASE_S = 5.0
"""With less time than this a load from a neighbour is waited for. With more it ends in time, or the device hangs."""
_READ_ONLY = 8
"""`cudaHostRegisterReadOnly`: for memory that the process cannot write."""
_ALIGNMENT = 8
"""Every record starts at a multiple of this, so that all numbers in it are aligned."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of bits. A copy of floats through them cannot change a bit."""

Load = Mapping[str, tuple[Sequence[int] | Tensor, Sequence[int]]]
"""By pool: slots on the device, and offsets in the store."""


class RankSection:
    """A section of a pool's records as one rank sees it.

    Attributes:
        share: the heads of this rank.
        start: the byte of a record at which they start.
        layers: for each layer of the pool, tensors [slot, head, ...] whose bytes follow each other for each head.
        layer_ids: of each layer of the pool, its number in the model.

    Raises:
        ValueError: the tensors do not fit the section.
    """

    def __init__(self, pool: PoolGeometry, section: Section, buffers: PoolBuffers, share: Share) -> None:
        layers = buffers.sections[section.name]
        self.share = share
        self.layer_ids = buffers.layer_ids
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
        self.move = self._mover()

    def _mover(self) -> Callable[..., None]:
        if self.layers[0][0].is_cpu:
            return self._move
        from workers.kv.ranks.kernels import Kernels

        return Kernels(self.layers).move

    def _move(self, slots: Tensor, scratch: Tensor, first: int, layers: int, *, to_pool: bool) -> None:
        """Move some layers of slots from scratch memory [slot, head, layer, bytes], or to it.

        NumPy's calls cost a tenth of torch's, and wait for no other threads.
        """
        at = slots.numpy()
        heads = scratch.view(len(slots), self.share.count, layers, self.head_bytes).numpy()
        for layer, tensors in enumerate(self.layers[first : first + layers]):
            start = 0
            for array in (tensor.numpy() for tensor in tensors):
                end = start + math.prod(array.shape[2:]) * array.itemsize
                items = heads[:, :, layer, start:end].view(array.dtype).reshape(len(at), *array.shape[1:])
                if to_pool:
                    array[at] = items
                else:
                    items[...] = array[at]
                start = end


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

    def rows(self, offset: int, rows: int, width: int, distance: int) -> Tensor:
        """Rows of bytes at equal distances in one store. Raises `KeyError` if the neighbour has gone."""
        number, place = divmod(offset, NEIGHBOUR_BYTES)
        return self._bytes[number].as_strided((rows, width), (distance, 1), place)


@dataclass(frozen=True, slots=True)
class Step:
    """Some layers of some slots of a section: as much as fits into a half of the scratch memory.

    Attributes:
        runs: records at equal distances: the first offset, how many, and the distance.
        first: of the layers.
    """

    section: RankSection
    slots: Tensor
    runs: Sequence[tuple[int, int, int]]
    first: int
    layers: int

    def move(self, scratch: Tensor, *, to_pool: bool) -> None:
        """Move the KV between slots and scratch memory."""
        section = self.section
        size = len(self.slots) * section.share.count * self.layers * section.head_bytes
        section.move(self.slots, scratch[:size], self.first, self.layers, to_pool=to_pool)

    def copy(self, stores: Stores, scratch: Tensor, *, to_store: bool) -> None:
        """Copy the records between the store and scratch memory: in as few copies of rows as possible."""
        section, at = self.section, 0
        heads, width = section.share.count, self.layers * section.head_bytes
        record = heads * width
        for offset, count, distance in self.runs:
            start = offset + section.start + self.first * section.head_bytes
            if width == section.block_bytes:  # the heads follow each other
                shapes = [(start, at, count, record, distance, record)]
            elif heads < count:
                block = section.block_bytes
                shapes = [(start + n * block, at + n * width, count, width, distance, record) for n in range(heads)]
            else:
                block = section.block_bytes
                shapes = [(start + n * distance, at + n * record, heads, width, block, width) for n in range(count)]
            for there, here, rows, size, apart, scratch_apart in shapes:
                of_store = stores.rows(there, rows, size, apart)
                of_scratch = scratch.as_strided((rows, size), (scratch_apart, 1), scratch.storage_offset() + here)
                if to_store:
                    copy_rows(of_store, of_scratch)
                else:
                    copy_rows(of_scratch, of_store)
            at += count * record


def steps_of(
    section: RankSection, slots: Tensor, offsets: Sequence[int], scratch_bytes: int, layers: int = 0
) -> Iterator[Step]:
    """The steps of a section. `layers`: of a step, where one record of them fits; 0: as many as fill one step."""
    if not len(slots):
        return
    layer_bytes = section.share.count * section.head_bytes
    if not layers:
        runs = runs_of(offsets, section.record_bytes)
        calls = sum(min(count, section.share.count) for _, count, _ in runs)
        layers = max(
            scratch_bytes // (len(slots) * layer_bytes),
            -(-_ROW_BYTES // section.head_bytes),
            -(-_COPY_BYTES * calls // (len(slots) * layer_bytes)),
        )
    layers = max(1, min(layers, len(section.layers), scratch_bytes // layer_bytes))
    records = max(1, scratch_bytes // (layers * layer_bytes))
    batches = [slice(first, first + records) for first in range(0, len(slots), records)]
    batch_runs = [runs_of(offsets[batch], section.record_bytes) for batch in batches]
    for first in range(0, len(section.layers), layers):
        for batch, runs in zip(batches, batch_runs, strict=True):
            yield Step(section, slots[batch], runs, first, min(layers, len(section.layers) - first))


def runs_of(offsets: Sequence[int], record_bytes: int) -> list[tuple[int, int, int]]:
    """Records that follow each other at the most common distance: first offset, count, distance."""
    offset = np.asarray(offsets, dtype=np.int64)
    distances = np.diff(offset)
    fits = distances[(distances >= record_bytes) & (distances <= _PITCH_BYTES)]
    found, counts = np.unique(fits, return_counts=True)
    distance = int(found[counts.argmax()]) if len(found) else record_bytes
    starts = np.concatenate(([0], np.flatnonzero(distances != distance) + 1))
    lengths = np.diff(np.concatenate((starts, [len(offset)])))
    return [(first, count, distance) for first, count in zip(offset[starts].tolist(), lengths.tolist(), strict=True)]


def copy_rows(into: Tensor, source: Tensor) -> None:
    """Copy rows of bytes on the current stream: between pinned memory and the device, without a wait."""
    if into.is_cpu and source.is_cpu:
        into.numpy()[...] = source.numpy()
        return
    from cuda.bindings import runtime

    kinds = runtime.cudaMemcpyKind
    kind = kinds.cudaMemcpyDeviceToHost if into.is_cpu else kinds.cudaMemcpyHostToDevice
    stream = torch.cuda.current_stream().cuda_stream
    ends = into.data_ptr(), into.stride(0), source.data_ptr(), source.stride(0)
    (error,) = runtime.cudaMemcpy2DAsync(*ends, into.shape[1], into.shape[0], kind, stream)
    if error:
        raise RuntimeError(f"a copy between the KV store and the device failed: {error}")


class Pipeline:
    """Steps that fill scratch memory and empty it, on two streams: one half is emptied while the other is filled.

    Made in the scheduler's thread: a stream belongs to the current device of the thread that makes it, and only there
    SGLang has set the rank's device.

    Attributes:
        device: torch's module for the device.
    """

    def __init__(self, where: torch.device, scratch_bytes: int, priority: int) -> None:
        self.device: Any = torch.get_device_module(where)
        self.filling, self.emptying = (self.device.Stream(priority=priority) for _ in range(2))
        self._halves = deque(
            (torch.empty(scratch_bytes, dtype=torch.uint8, device=where), self.device.Event()) for _ in range(2)
        )

    def step(self, fill: Callable[[Tensor], None], empty: Callable[[Tensor], None]) -> Any:
        """Enqueue a step. Returns an event after its end."""
        scratch, is_free = self._halves[0]
        self.filling.wait_event(is_free)
        self.launch(self.filling, partial(fill, scratch))
        self.emptying.wait_event(self.event(self.filling))
        self.launch(self.emptying, partial(empty, scratch))
        ended = self.event(self.emptying)
        self._halves.popleft()
        self._halves.append((scratch, ended))
        return ended

    def launch(self, stream: Any, act: Callable[[], None]) -> None:
        """Enqueue work on a stream."""
        with self.device.stream(stream):
            act()

    def event(self, stream: Any) -> Any:
        """An event after what is on a stream now."""
        event = self.device.Event()
        event.record(stream)
        return event


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
        load_bytes: int = _LOAD_BYTES,
        write_bytes: int = _WRITE_BYTES,
    ) -> None:
        self.layers = layers
        self._stores = Stores(store)
        self._lock = threading.Lock()
        self._sections = {
            pool.name: [
                RankSection(pool, section, buffers[pool.name], head_share(section.heads, tp, rank))
                for section in pool.sections
            ]
            for pool in geometry.pools
        }
        sections = [section for of_pool in self._sections.values() for section in of_pool]
        least = max(section.share.count * section.head_bytes for section in sections)
        self._where = sections[0].layers[0][0].device
        self._load_bytes, self._write_bytes = max(load_bytes, least), max(write_bytes, least)
        # A load's kernels are short, and what computes waits for them.
        self.loading = Pipeline(self._where, self._load_bytes, priority=-1)
        self.writing = Pipeline(self._where, self._write_bytes, priority=0)

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy slots of the device (pages, or states) to the records at `offsets`. Returns when the copy has ended.

        Only the heads that this rank writes are copied. The slots must have been written.
        """
        _check(slots, offsets)
        pipeline = self.writing
        with pipeline.device.stream(pipeline.filling):
            at = torch.tensor(list(slots), dtype=torch.int64, device=self._where)
        for section in self._sections[pool]:
            if section.share.writes:
                every = len(section.layers)
                for step in steps_of(section, at, offsets, self._write_bytes, every):
                    pipeline.step(partial(step.move, to_pool=False), partial(step.copy, self._stores, to_store=True))
        pipeline.event(pipeline.emptying).synchronize()

    def load(self, loads: Load, after: Sequence[Any] = ()) -> list[Any]:
        """Enqueue copies of records to slots of the device.

        Args:
            after: events before which the slots must not be written.

        Returns:
            For each layer of the model, an event after all that is loaded of it and of those before it, and one after
            the whole load. A pass as one CUDA graph waits for the last layer only.
        """
        for slots, offsets in loads.values():
            _check(slots, offsets)
        pipeline = self.loading
        with self._lock:
            for event in after:
                pipeline.emptying.wait_event(event)
            ended, last = [pipeline.event(pipeline.emptying)], [0] * self.layers
            for step in sorted(self._load_steps(loads), key=lambda step: step.section.layer_ids[step.first]):
                copy = partial(step.copy, self._stores, to_store=False)
                for layer in step.section.layer_ids[step.first : step.first + step.layers]:
                    last[layer] = len(ended)
                ended.append(pipeline.step(copy, partial(step.move, to_pool=True)))
            return [*(ended[number] for number in accumulate(last, max)), pipeline.event(pipeline.emptying)]

    def _load_steps(self, loads: Load) -> Iterator[Step]:
        for pool, (slots, offsets) in loads.items():
            slots = torch.as_tensor(slots, dtype=torch.int64, device=self._where)
            if slots.is_cuda:
                slots.record_stream(self.loading.emptying)
            for section in self._sections[pool]:
                yield from steps_of(section, slots, offsets, self._load_bytes)

    def add_neighbour(self, number: int, memory: Tensor) -> None:
        """Let loads read the store of a neighbour; for a GPU it must be pinned."""
        self._stores.add(number, memory)

    def remove_neighbour(self, number: int) -> Tensor | None:
        """Let the loads from a neighbour that run end. Later ones raise `KeyError`."""
        with self._lock:
            memory = self._stores.remove(number)
        self.loading.event(self.loading.filling).synchronize()
        return memory


def _check(slots: Sequence[int] | Tensor, offsets: Sequence[int]) -> None:
    if len(slots) != len(offsets) or any(offset % _ALIGNMENT for offset in offsets):
        raise ValueError(f"{len(slots)} slots, {len(offsets)} records; each starts at a multiple of {_ALIGNMENT} bytes")


# -- beside what the engine computes


@dataclass(slots=True)
class _Running:
    """Loads that were started together.

    Attributes:
        after: they write nothing before these events.
        landed: as `RankCopies.load` returns it.
        is_used: the engine computes with them.
    """

    rids: list[str]
    until_s: float
    after: list[Any]
    landed: Future[list[Any]] = field(default_factory=Future)
    is_used: bool = False


class PageLoader:
    """The loads of one rank: queued by request, started together for one forward pass.

    It is SGLang's counter of layers as well: what computes a layer waits on the device until the layer has landed.
    Records are given free in a thread of its own, when the copies of them have ended.

    Args:
        link: protects the records of a request while they are read.
        forward_stream: the stream on which SGLang computes under its overlap schedule; None: that of the caller.
    """

    def __init__(self, copies: RankCopies, link: RankLink, forward_stream: Any) -> None:
        self.num_layers = copies.layers
        self.consumer_index = -1
        self._copies = copies
        self._link = link
        self._device = copies.loading.device
        self._forward_stream = forward_stream
        self._queued: dict[str, tuple[Load, float]] = {}
        self._running: dict[int, _Running] = {}
        self._started = 0
        self._to_release: Queue[_Running | None] = Queue()
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
        """Enqueue all queued loads on the device. Returns their index, or -1 if nothing is queued."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        index, self._started = self._started, self._started + 1
        merged = _merged([load for load, _ in queued.values()])
        running = _Running(list(queued), min(until_s for _, until_s in queued.values()), self._fence())
        self._running[index] = running
        self._to_release.put(running)
        try:
            running.landed.set_result(self._copies.load(merged, running.after))
        except Exception as error:
            log.exception("KV load failed")
            running.landed.set_exception(error)
        return index

    def finish(self, index: int) -> bool:
        """Whether the loads that were started under `index` land, for the forward pass that was launched with them."""
        running = self._running.pop(index, None)
        if running is None:
            return True
        landed = self._copies.loading.event(self._copies.loading.emptying)
        # The slots may be given to what is launched later.
        (self._forward_stream or self._device.current_stream()).wait_event(landed)
        if running.landed.exception() is not None:
            landed.synchronize()
            return False
        if running.until_s - time.monotonic() < _LEASE_S:
            landed.synchronize()
        running.is_used = time.monotonic() < running.until_s
        return running.is_used

    def set_consumer(self, index: int) -> None:
        """What is computed next uses the loads of this index."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Let the current stream wait until a layer has landed."""
        running = self._running.get(self.consumer_index)
        if running is not None and running.landed.exception() is None:
            self._device.current_stream().wait_event(running.landed.result()[layer])

    def reset(self) -> None:
        """Forget queued loads and end started ones."""
        for rid in list(self._queued):
            self.cancel(rid)
        self._running.clear()
        self.consumer_index = -1
        self._copies.loading.event(self._copies.loading.emptying).synchronize()

    def close(self) -> None:
        """End the thread."""
        self._to_release.put(None)
        self._thread.join(10.0)

    def _run(self) -> None:
        while (running := self._to_release.get()) is not None:
            try:
                self._release(running)
            except Exception:
                log.exception("the records of a KV load are not given free")

    def _release(self, running: _Running) -> None:
        """Give the records of loads free when they have been read."""
        for event in running.after:
            event.synchronize()
        started_s = time.perf_counter()
        has_failed = running.landed.exception() is not None
        pipeline = self._copies.loading
        (pipeline.event(pipeline.emptying) if has_failed else running.landed.result()[-1]).synchronize()
        if running.is_used and time.monotonic() >= running.until_s:
            log.critical("a KV load outlasted the lease on its records, and the engine has computed with it")
            os._exit(1)
        if not has_failed:
            self._link.loaded(running.rids, time.perf_counter() - started_s)
        for rid in running.rids:
            self._link.end_load(rid)

    def _fence(self) -> list[Any]:
        """Events after which the slots may be written: what was launched before may still read and write them.

        A request that ends by a stop token or an abort gives its last page back while the next step, which was launched
        before the end was known, still writes a token into that page. The stream of this thread does not wait for the
        end of the step. It cannot take long, because the step needs nothing of the load.
        """
        streams = {self._device.current_stream(), self._forward_stream} - {None}
        return [self._copies.loading.event(stream) for stream in streams]


def _merged(loads: Sequence[Load]) -> Load:
    merged = {}
    for pool in dict.fromkeys(pool for load in loads for pool in load):
        parts = [load[pool] for load in loads if pool in load]
        slots = torch.cat([torch.as_tensor(of_load, dtype=torch.int64) for of_load, _ in parts])
        merged[pool] = slots, [offset for _, offsets in parts for offset in offsets]
    return merged


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
