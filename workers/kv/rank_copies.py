"""Copies between the device buffers of one rank and the records of its worker's store.

A rank writes and loads only the heads that it holds. They are contiguous in a record, because the layers of a head
follow each other there; see `workers.kv.geometry`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.kv.geometry import KvGeometry, PoolGeometry, Section, Share, head_share

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of bits. A copy of floats through them cannot change a bit."""
_ALIGNMENT = 8
"""Every record starts at a multiple of this, so that all elements of it are aligned."""
_COPY_BYTES = 256 << 10
"""What one copy between host and GPU should move at least: 256 KB take as long over PCIe as the call itself."""
_SCRATCH_BYTES = 64 << 20
"""GPU memory in which the KV of some records waits between the pool and the store."""


@dataclass(frozen=True, slots=True)
class PoolBuffers:
    """One pool in the memory of one rank.

    Attributes:
        layer_ids: for each layer of the pool, its number in the model.
        sections: for each section of a record, for each layer of the pool, the tensors whose bytes follow each other in
            the record. Shape [slot, head of this rank, ...]; a slot is a page of tokens or one state.
    """

    layer_ids: tuple[int, ...]
    sections: Mapping[str, Sequence[Sequence[Tensor]]]


def attention_buffers(keys: Sequence[Tensor], values: Sequence[Tensor], page_size: int, layer_ids: Any) -> PoolBuffers:
    """K and V of multi-head or grouped-query attention, per layer [token slot, head, dim]."""
    layers = [tuple(_pages(part, page_size) for part in pair) for pair in zip(keys, values, strict=True)]
    return PoolBuffers(tuple(layer_ids), {"kv": layers})


def latent_buffers(latents: Sequence[Tensor], page_size: int, layer_ids: Any) -> PoolBuffers:
    """The latent vectors of MLA, per layer [token slot, 1, dim]. Every rank holds the same."""
    return PoolBuffers(tuple(layer_ids), {"latent": [(_pages(latent, page_size),) for latent in latents]})


def state_buffers(
    temporal: Tensor, convolution: Tensor, channels: Mapping[str, tuple[int, int]], layer_ids: Any
) -> PoolBuffers:
    """States of linear attention.

    Args:
        temporal: [layer, slot, value head, ...].
        convolution: [layer, slot, channel, width]. On a rank its channels are those of the rank's heads of q, then of
            k, then of v, so that ranks cannot be joined by putting their channels one after the other.
        channels: for q, k and v: heads on this rank, and channels per head.
    """
    sections: dict[str, list[tuple[Tensor, ...]]] = {"temporal": [(layer,) for layer in temporal]}
    at = 0
    for name, (heads, width) in channels.items():
        sections[f"conv_{name}"] = [
            (layer[:, at : at + heads * width].unflatten(1, (heads, width)),) for layer in convolution
        ]
        at += heads * width
    if at != convolution.shape[2]:
        raise ValueError(f"the convolution has {convolution.shape[2]} channels, q, k and v have {at}")
    return PoolBuffers(tuple(layer_ids), sections)


def pool_geometry(name: str, buffers: PoolBuffers, heads: Mapping[str, int], window_pages: int = 0) -> PoolGeometry:
    """The records of a pool. `heads`: of the whole model, by section."""
    sections = [
        Section(section, heads[section], len(layers), sum(_head_bytes(part) for part in layers[0]))
        for section, layers in buffers.sections.items()
    ]
    return PoolGeometry(name, tuple(sections), window_pages)


class RankCopies:
    """The copies of one rank.

    Args:
        buffers: by pool.
        store: the whole mapping of the store, one dimension of bytes. On a GPU it must be pinned.
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
        self._store = store
        self._layers = layers
        self._geometry = {pool.name: pool for pool in geometry.pools}
        self._sections = {
            pool.name: [
                _RankSection(
                    pool, section, buffers[pool.name].sections[section.name], head_share(section.heads, tp, rank)
                )
                for section in pool.sections
            ]
            for pool in geometry.pools
        }
        self._copies = {name: _copies_for(store, sections) for name, sections in self._sections.items()}
        self._of_layer: list[list[tuple[str, int]]] = [[] for _ in range(layers)]
        for name, pool_buffers in buffers.items():
            for index, layer in enumerate(pool_buffers.layer_ids):
                self._of_layer[layer].append((name, index))

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy slots of the device (pages, or states) to the records at `offsets`, on the caller's stream.

        Only the heads that this rank writes are copied. On a GPU the copies have ended when the stream gets there.
        """
        _check(slots, offsets)
        for section in self._sections[pool]:
            if section.share.writes:
                self._copies[pool].write(section, slots, offsets)

    def load(self, loads: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> Iterator[int]:
        """Copy records to slots of the device, on the caller's stream.

        Args:
            loads: by pool, slots and offsets.

        Yields:
            Each layer of the model, in order. On a GPU the layer's copies are then on the stream, not yet done.
        """
        for slots, offsets in loads.values():
            _check(slots, offsets)
        for layer in range(self._layers):
            for pool, index in self._of_layer[layer]:
                if pool in loads:
                    for section in self._sections[pool]:
                        self._copies[pool].load(section, index, *loads[pool])
            yield layer

    def checksums(self, pool: str, offset: int) -> dict[int, int]:
        """CRC-32 of the heads that this rank writes, by their place in `PoolGeometry.blocks`."""
        return self._checksums(pool, offset, written=True)

    def verify(self, pool: str, offset: int, expected: Sequence[int]) -> bool:
        """Whether the heads that this rank loads have the checksums that were taken when the record was written."""
        return all(expected[block] == crc for block, crc in self._checksums(pool, offset, written=False).items())

    def _checksums(self, pool: str, offset: int, *, written: bool) -> dict[int, int]:
        geometry = self._geometry[pool]
        blocks = geometry.blocks()
        record = memoryview(self._store.numpy())[offset : offset + geometry.record_bytes]
        found, base = {}, 0
        for section in self._sections[pool]:
            share = section.share
            if share.writes or not written:
                for block in range(base + share.first, base + share.first + share.count):
                    start, length = blocks[block]
                    found[block] = zlib.crc32(record[start : start + length])
            base += section.heads
        return found


class _RankSection:
    """A section of a pool's records as one rank sees it.

    Attributes:
        share: the heads of this rank.
        start: the byte of a record at which they start.
        layers: for each layer of the pool, the parts of a head's bytes.
    """

    def __init__(self, pool: PoolGeometry, section: Section, layers: Sequence[Sequence[Tensor]], share: Share) -> None:
        self.share = share
        self.heads = section.heads
        self.head_bytes = section.head_bytes
        self.block_bytes = section.block_bytes
        self.record_bytes = pool.record_bytes
        self.start = pool.starts()[section.name] + share.first * section.block_bytes
        self.layers = [_parts(tensors) for tensors in layers]
        for parts in self.layers:
            sizes = [math.prod(part.inner) * part.itemsize for part in parts]
            aligned = all(size % part.itemsize == 0 for part in parts for size in (self.start, *sizes))
            heads = {int(part.tensor.shape[1]) for part in parts}
            if heads != {share.count} or sum(sizes) != section.head_bytes or not aligned:
                raise ValueError(
                    f"KV pool {pool.name}: buffers of {sum(sizes)} bytes for each of {sorted(heads)} heads and layer "
                    f"do not fit section {section.name} ({section.head_bytes} bytes, {share.count} heads on this rank)"
                )
        if len(self.layers) != section.layers:
            raise ValueError(f"KV pool {pool.name}: {len(self.layers)} layers of buffers, {section.layers} in a record")


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor [slot, head, ...] of bits, and where a head's bytes of it lie behind the start of the head's layer."""

    tensor: Tensor
    itemsize: int
    inner: tuple[int, ...]
    inner_strides: tuple[int, ...]
    offset: int

    def in_memory(self, memory: Tensor, start: int, records: int, record_bytes: int, block_bytes: int) -> Tensor:
        """The same shape in a flat memory of bytes: [record, head, ...], the first of them at byte `start`."""
        size = (records, self.tensor.shape[1], *self.inner)
        strides = (record_bytes // self.itemsize, block_bytes // self.itemsize, *self.inner_strides)
        typed = memory.view(self.tensor.dtype)
        return typed.as_strided(size, strides, typed.storage_offset() + (start + self.offset) // self.itemsize)


class _DirectCopies:
    """Copies in host memory: each layer of neighbouring slots and records is one copy."""

    def __init__(self, store: Tensor) -> None:
        self._store = store

    def write(self, section: _RankSection, slots: Sequence[int], offsets: Sequence[int]) -> None:
        for index in range(len(section.layers)):
            for device, record in self._pairs(section, index, slots, offsets):
                record.copy_(device)

    def load(self, section: _RankSection, index: int, slots: Sequence[int], offsets: Sequence[int]) -> None:
        for device, record in self._pairs(section, index, slots, offsets):
            device.copy_(record)

    def _pairs(
        self, section: _RankSection, index: int, slots: Sequence[int], offsets: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The same bytes of one layer, in the pool and in the store."""
        start = section.start + index * section.head_bytes
        for slot, offset, count in _runs(slots, offsets, section.record_bytes):
            for part in section.layers[index]:
                device = part.tensor[slot : slot + count]
                yield (
                    device,
                    part.in_memory(self._store, offset + start, count, section.record_bytes, section.block_bytes),
                )


class _ScratchCopies:
    """Copies between a GPU and pinned host memory, through scratch memory on the GPU.

    Kernels gather and scatter on the GPU, so that what crosses PCIe is contiguous on both sides.
    """

    def __init__(self, store: Tensor, scratch_bytes: int = _SCRATCH_BYTES, copy_bytes: int = _COPY_BYTES) -> None:
        self._store = store
        self._scratch_bytes = scratch_bytes
        self._copy_bytes = copy_bytes

    def write(self, section: _RankSection, slots: Sequence[int], offsets: Sequence[int]) -> None:
        width = section.share.count * section.block_bytes
        for some_slots, some_offsets in self._batches(slots, offsets, width):
            scratch, at = self._scratch(section, some_slots, width)
            for index, parts in enumerate(section.layers):
                for part in parts:
                    start = index * section.head_bytes
                    part.in_memory(scratch, start, len(at), width, section.block_bytes).copy_(part.tensor[at])
            for number, offset in enumerate(some_offsets):
                into = self._store[offset + section.start : offset + section.start + width]
                into.copy_(scratch[number * width : (number + 1) * width], non_blocking=True)

    def load(self, section: _RankSection, index: int, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Load the group of layers that starts with layer `index`; nothing for the other layers of a group."""
        group = max(1, self._copy_bytes // section.head_bytes)
        if index % group:
            return
        parts = section.layers[index : index + group]
        block = len(parts) * section.head_bytes
        width = section.share.count * block
        for some_slots, some_offsets in self._batches(slots, offsets, width):
            scratch, at = self._scratch(section, some_slots, width)
            for number, offset in enumerate(some_offsets):
                start = offset + section.start + index * section.head_bytes
                for into, out_of, length in self._blocks(section, number * width, start, block):
                    scratch[into : into + length].copy_(self._store[out_of : out_of + length], non_blocking=True)
            for layer, tensors in enumerate(parts):
                for part in tensors:
                    start = layer * section.head_bytes
                    part.tensor[at] = part.in_memory(scratch, start, len(at), width, block)

    @staticmethod
    def _blocks(section: _RankSection, into: int, out_of: int, block: int) -> Iterator[tuple[int, int, int]]:
        """Target, source and length of the copies of a record: one if it takes all layers, otherwise one per head."""
        heads = section.share.count
        if block == section.block_bytes:
            yield into, out_of, heads * block
            return
        for head in range(heads):
            yield into + head * block, out_of + head * section.block_bytes, block

    def _batches(
        self, slots: Sequence[int], offsets: Sequence[int], width: int
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        records = max(1, self._scratch_bytes // width)
        for first in range(0, len(slots), records):
            yield slots[first : first + records], offsets[first : first + records]

    def _scratch(self, section: _RankSection, slots: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
        """Scratch memory for the records of these slots, and the slots as an index on the device."""
        device = section.layers[0][0].tensor.device
        scratch = torch.empty(len(slots) * width, dtype=torch.uint8, device=device)
        return scratch, torch.tensor(list(slots), dtype=torch.int64, device=device)


def _copies_for(store: Tensor, sections: Sequence[_RankSection]) -> _DirectCopies | _ScratchCopies:
    on_host = sections[0].layers[0][0].tensor.device.type == "cpu"
    return _DirectCopies(store) if on_host else _ScratchCopies(store)


def _parts(tensors: Sequence[Tensor]) -> list[_Part]:
    parts, at = [], 0
    for tensor in tensors:
        bits = tensor.view(_INTEGERS[tensor.element_size()])
        inner = tuple(int(size) for size in bits.shape[2:])
        strides = tuple(math.prod(inner[axis + 1 :]) for axis in range(len(inner)))
        parts.append(_Part(bits, bits.element_size(), inner, strides, at))
        at += _head_bytes(tensor)
    return parts


def _head_bytes(tensor: Tensor) -> int:
    return math.prod(int(size) for size in tensor.shape[2:]) * int(tensor.element_size())


def _pages(buffer: Tensor, page_size: int) -> Tensor:
    """[token slot, head, dim] as [page, head, token, dim]; tokens behind the last whole page are left out."""
    pages = buffer.shape[0] // page_size
    return buffer[: pages * page_size].unflatten(0, (pages, page_size)).transpose(1, 2)


def _check(slots: Sequence[int], offsets: Sequence[int]) -> None:
    if len(slots) != len(offsets) or any(offset % _ALIGNMENT for offset in offsets):
        raise ValueError(
            f"{len(slots)} slots for {len(offsets)} records, which must start at multiples of {_ALIGNMENT}"
        )


def _runs(slots: Sequence[int], offsets: Sequence[int], record_bytes: int) -> list[tuple[int, int, int]]:
    """Slots that are neighbours and whose records are neighbours: first slot, first offset, count."""
    slot, offset = np.asarray(slots, dtype=np.int64), np.asarray(offsets, dtype=np.int64)
    if not len(slot):
        return []
    breaks = np.flatnonzero((np.diff(slot) != 1) | (np.diff(offset) != record_bytes)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(slot)])))
    return list(zip(slot[starts].tolist(), offset[starts].tolist(), lengths.tolist(), strict=True))
