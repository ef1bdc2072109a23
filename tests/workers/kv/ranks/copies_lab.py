"""Synthetic models of every family, and a store with records of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from workers.kv.ranks import copies
from workers.kv.ranks.copies import RankCopies
from workers.kv.ranks.pools import (
    PoolBuffers,
    attention_buffers,
    latent_buffers,
    pool_geometry,
    state_buffers,
)
from workers.kv.shared import NEIGHBOUR_BYTES, KvGeometry, PoolGeometry, head_share

PAGE, PAGES, LAYERS = 4, 7, 6
TPS = (1, 2, 4, 8)
SLOTS = [5, 1, 2, 3, 6]
"""Device slots, in the order of the records: with neighbours and without."""

Shard = Callable[[int, int], Mapping[str, PoolBuffers]]
"""TP and rank to the buffers of that rank, which hold the model's KV."""


def random(*shape: int, dtype: Any) -> Any:
    """Any bits at all: a copy must keep those of NaN, too. The same on every default device after the same seed."""
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, device="cpu")
    return bits.view(dtype).to(torch.get_default_device())


def heads_of(whole: Any, tp: int, rank: int, axis: int) -> Any:
    """A rank's heads of a tensor with all heads."""
    share = head_share(whole.shape[axis], tp, rank)
    return whole.narrow(axis, share.first, share.count).clone()


def attention(heads: int, dim: int, v_dim: int, layers: list[int], dtype: Any) -> Callable[[int, int], PoolBuffers]:
    # One slot more than whole pages: SGLang's pools have slots that belong to no page.
    keys = [random(PAGES * PAGE + 1, heads, dim, dtype=dtype) for _ in layers]
    values = [random(PAGES * PAGE + 1, heads, v_dim, dtype=dtype) for _ in layers]
    return lambda tp, rank: attention_buffers(
        [heads_of(key, tp, rank, 1) for key in keys], [heads_of(value, tp, rank, 1) for value in values], PAGE, layers
    )


def mha(heads: int, dtype: Any, dim: int = 16, v_dim: int = 16) -> tuple[Shard, list[PoolGeometry]]:
    pool = attention(heads, dim, v_dim, list(range(LAYERS)), dtype)
    return lambda tp, rank: {"kv": pool(tp, rank)}, [pool_geometry("kv", pool(1, 0), {"kv": heads})]


def mla(dtype: Any) -> tuple[Shard, list[PoolGeometry]]:
    latents = [random(PAGES * PAGE, 1, 24, dtype=dtype) for _ in range(LAYERS)]

    def shard(_tp: int, _rank: int) -> Mapping[str, PoolBuffers]:
        return {"kv": latent_buffers([latent.clone() for latent in latents], PAGE, range(LAYERS))}

    return shard, [pool_geometry("kv", shard(1, 0)["kv"], {"latent": 1})]


def sliding_window(dtype: Any) -> tuple[Shard, list[PoolGeometry]]:
    full, window = attention(2, 32, 16, [1, 4], dtype), attention(8, 8, 8, [0, 2, 3, 5], dtype)
    geometry = [pool_geometry("kv", full(1, 0), {"kv": 2}), pool_geometry("swa", window(1, 0), {"kv": 8}, 3)]
    return lambda tp, rank: {"kv": full(tp, rank), "swa": window(tp, rank)}, geometry


def gated_delta(dtype: Any, transposed: bool = False) -> tuple[Shard, list[PoolGeometry]]:
    """Qwen3-Next: states of fp32 and a convolution over the channels of q, k and v."""
    q_heads, v_heads, q_dim, v_dim, layers = 8, 16, 8, 16, [0, 1, 2, 4, 5]
    full = attention(2, 16, 16, [3], dtype)
    temporal = random(len(layers), PAGES, v_heads, v_dim, q_dim, dtype=torch.float32)
    q, k = (random(len(layers), PAGES, q_heads, q_dim * 3, dtype=dtype) for _ in range(2))
    v = random(len(layers), PAGES, v_heads, v_dim * 3, dtype=dtype)

    def shard(tp: int, rank: int) -> Mapping[str, PoolBuffers]:
        parts = [heads_of(part, tp, rank, 2).reshape(len(layers), PAGES, -1, 3) for part in (q, k, v)]
        convolution = torch.cat(parts, dim=2)
        if transposed:  # SGLang's layout for CPUs with AMX: channels are neighbours
            convolution = convolution.transpose(2, 3).contiguous().transpose(2, 3)
        channels = {"q": (q_heads // tp, q_dim), "k": (q_heads // tp, q_dim), "v": (v_heads // tp, v_dim)}
        states = state_buffers(heads_of(temporal, tp, rank, 2), convolution, channels, layers)
        return {"kv": full(tp, rank), "mamba": states}

    heads = {"temporal": v_heads, "conv_q": q_heads, "conv_k": q_heads, "conv_v": v_heads}
    geometry = [pool_geometry("kv", full(1, 0), {"kv": 2}), pool_geometry("mamba", shard(1, 0)["mamba"], heads, 1)]
    return shard, geometry


BF16, FP8, FP32 = torch.bfloat16, torch.uint8, torch.float32
FAMILIES: dict[str, Callable[[], tuple[Shard, list[PoolGeometry]]]] = {
    "8 heads bf16": lambda: mha(8, BF16),
    "16 heads fp8": lambda: mha(16, FP8),
    "4 heads fp32": lambda: mha(4, FP32),
    "2 heads bf16": lambda: mha(2, BF16),
    "1 head fp8": lambda: mha(1, FP8),
    "K and V differ": lambda: mha(4, BF16, 24, 8),
    "MLA bf16": lambda: mla(BF16),
    "MLA fp8": lambda: mla(FP8),
    "SWA bf16": lambda: sliding_window(BF16),
    "GDN bf16": lambda: gated_delta(BF16),
    "GDN fp32, transposed": lambda: gated_delta(FP32, transposed=True),
}


class Lab:
    """A store with the records of some slots of a model.

    Records of different pools alternate, so that those of one pool are not all neighbours.
    """

    def __init__(self, shard: Shard, pools: list[PoolGeometry]) -> None:
        self.shard = shard
        self.geometry = KvGeometry("f", PAGE, tuple(pools))
        self.offsets: dict[str, list[int]] = {pool.name: [] for pool in pools}
        at = 64
        for number in range(len(SLOTS)):
            for pool in pools:
                self.offsets[pool.name].append(at)
                at += pool.record_bytes + (64 if number == 1 else 0)
        self.store = torch.zeros(at + 64, dtype=torch.uint8, device="cpu")

    def copies(self, buffers: Mapping[str, PoolBuffers], tp: int, rank: int) -> RankCopies:
        return RankCopies(self.geometry, buffers, self.store, tp=tp, rank=rank, layers=LAYERS)

    def write(self, tp: int) -> None:
        self.store.fill_(0)
        for rank in range(tp):
            copies = self.copies(self.shard(tp, rank), tp, rank)
            for pool, offsets in self.offsets.items():
                copies.write(pool, SLOTS, offsets)

    def loaded(
        self, tp: int, rank: int, as_rank: int | None = None, neighbour: Any = None
    ) -> Mapping[str, PoolBuffers]:
        """The buffers of a rank after a load into zeroed slots.

        Args:
            as_rank: with the heads of another.
            neighbour: a store with the same records at the same offsets, from which every second record is loaded.
        """
        buffers = self.shard(tp, rank)
        for _, tensor in slots_of(buffers):
            tensor[SLOTS] = 0
        copies = self.copies(buffers, tp, rank if as_rank is None else as_rank)
        load = {pool: (SLOTS, list(offsets)) for pool, offsets in self.offsets.items()}
        if neighbour is not None:
            copies.add_neighbour(3, neighbour)
            for _, offsets in load.values():
                offsets[::2] = [3 * NEIGHBOUR_BYTES + offset for offset in offsets[::2]]
        assert len(copies.load(load)) == LAYERS + 1
        return buffers


def slots_of(buffers: Mapping[str, PoolBuffers]) -> list[tuple[str, Any]]:
    return [
        (f"{pool} {section} {layer}", tensor)
        for pool, pool_buffers in buffers.items()
        for section, layers in pool_buffers.sections.items()
        for layer, tensors in enumerate(layers)
        for tensor in tensors
    ]


def differences(ours: Mapping[str, PoolBuffers], theirs: Mapping[str, PoolBuffers]) -> list[str]:
    pairs = zip(slots_of(ours), slots_of(theirs), strict=True)
    return [name for (name, mine), (_, other) in pairs if not same_bits(mine, other)]


def same_bits(first: Any, second: Any) -> bool:
    return first.contiguous().view(torch.uint8).equal(second.contiguous().view(torch.uint8))


def cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory for a few records, so that a load and a write have many steps."""
    defaults: Any = RankCopies.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "load_bytes", 5000)
    monkeypatch.setitem(defaults, "write_bytes", 3000)
    monkeypatch.setattr(copies, "_ROW_BYTES", 700)
    monkeypatch.setattr(copies, "_COPY_BYTES", 1)
