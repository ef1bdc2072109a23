"""The pools of one rank as tensors [slot, head, ...], section by section of a record."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workers.kv.geometry import PoolGeometry, Section


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

    def first_layers(self) -> Iterator[Tensor]:
        """The tensors of the first layer of each section. Those of the other layers are like them."""
        for layers in self.sections.values():
            yield from layers[0]


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

    Raises:
        ValueError: the convolution has other channels.
    """
    sections: dict[str, list[tuple[Tensor, ...]]] = {"temporal": [(layer,) for layer in temporal]}
    at = 0
    for name, (heads, width) in channels.items():
        rows = slice(at, at + heads * width)
        at += heads * width
        if at <= convolution.shape[2]:
            sections[f"conv_{name}"] = [(layer[:, rows].unflatten(1, (heads, width)),) for layer in convolution]
    if at != convolution.shape[2]:
        raise ValueError(f"the convolution has {convolution.shape[2]} channels on a rank, but q, k and v have {at}")
    return PoolBuffers(tuple(layer_ids), sections)


def pool_geometry(name: str, buffers: PoolBuffers, heads: Mapping[str, int], window_pages: int = 0) -> PoolGeometry:
    """The records of a pool. `heads`: of the whole model, by section."""
    sections = [
        Section(section, heads[section], len(layers), sum(head_bytes(part) for part in layers[0]))
        for section, layers in buffers.sections.items()
    ]
    return PoolGeometry(name, tuple(sections), window_pages)


def head_bytes(tensor: Tensor) -> int:
    """Bytes of one head in one slot of a tensor [slot, head, ...]."""
    return math.prod(int(size) for size in tensor.shape[2:]) * int(tensor.element_size())


def _pages(buffer: Tensor, page_size: int) -> Tensor:
    """[token slot, head, dim] as [page, head, token, dim]; tokens behind the last whole page are left out."""
    pages = buffer.shape[0] // page_size
    return buffer[: pages * page_size].unflatten(0, (pages, page_size)).transpose(1, 2)
