"""Where KV pages lie in memory: the description of a pool for its readers, and page lists as large blocks."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Blocks = np.ndarray[Any, np.dtype[np.uint64]]
"""Rows of (address, bytes, device id), as NIXL takes them."""

_HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A pool of KV pages, one buffer for K and one for V of each layer.

    Attributes:
        fingerprint: of weights, settings and types of the KV; pages are exchangeable only if it is equal.
        page_size: tokens per page.
        pages: pages per buffer.
        page_bytes: bytes of one page in each buffer; page i of a buffer starts i times that after its address.
        addresses: where each buffer starts.
        memory: `DRAM` or `VRAM`.
        device_id: of the VRAM; 0 in DRAM.
    """

    fingerprint: str
    page_size: int
    pages: int
    page_bytes: tuple[int, ...]
    addresses: tuple[int, ...]
    memory: str = "DRAM"
    device_id: int = 0

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all buffers."""
        return sum(self.page_bytes)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> PoolLayout:
        """The inverse of `asdict` and JSON, which has no tuples. Raises `TypeError` or `KeyError` for anything else."""
        return cls(**{**fields, "page_bytes": tuple(fields["page_bytes"]), "addresses": tuple(fields["addresses"])})

    def blocks(self, starts: Sequence[int], lengths: Sequence[int]) -> Blocks:
        """Runs of pages as memory blocks, buffer by buffer."""
        widths = np.asarray(self.page_bytes, dtype=np.uint64)[:, None]
        bases = np.asarray(self.addresses, dtype=np.uint64)[:, None]
        rows = np.empty((len(self.addresses) * len(starts), 3), dtype=np.uint64)
        rows[:, 0] = (bases + np.asarray(starts, dtype=np.uint64)[None, :] * widths).ravel()
        rows[:, 1] = (np.asarray(lengths, dtype=np.uint64)[None, :] * widths).ravel()
        rows[:, 2] = self.device_id
        return rows


@dataclass(frozen=True, slots=True)
class Descriptor:
    """All that a reader needs to read another worker's pool."""

    layout: PoolLayout
    agent: bytes

    def encode(self) -> bytes:
        """As it travels in a lease."""
        header = json.dumps(asdict(self.layout)).encode()
        return _HEADER.pack(len(header)) + header + self.agent


def decode_descriptor(data: bytes) -> Descriptor:
    """The counterpart of `Descriptor.encode`. Raises `ValueError` for anything else."""
    try:
        (length,) = _HEADER.unpack_from(data)
        fields = json.loads(data[_HEADER.size : _HEADER.size + length])
        return Descriptor(PoolLayout.from_json(fields), data[_HEADER.size + length :])
    except (struct.error, TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"not a KV descriptor: {error}") from None


def mismatch(ours: PoolLayout, theirs: PoolLayout) -> str | None:
    """Why pages of one pool cannot be used in the other; None if they can."""
    for name in ("fingerprint", "page_size", "page_bytes"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name} differs: {_short(getattr(ours, name))} here, {_short(getattr(theirs, name))} there"
    return None


def runs(sources: Sequence[int], targets: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Join pages that are neighbours on both sides.

    Returns:
        First source page, first target page and length of each run, in order.
    """
    source, target = np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
    if not len(source):
        return [], [], []
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(source)])))
    return source[starts].tolist(), target[starts].tolist(), lengths.tolist()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
