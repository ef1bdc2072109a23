"""What fits into a replica's memory: weights first, then KV."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.perf.gpus import Gpu
from ampd.perf.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """How much of a GPU's memory an engine uses: a share of all, less what activations and graphs need."""

    usable_share: float = 0.9
    reserve_bytes: float = 2e9


def kv_capacity_tokens(shape: ModelShape, gpu: Gpu, tp: int, share: MemoryShare) -> int:
    """KV tokens of one replica beside its weights; negative or 0: the weights alone do not leave room."""
    free_bytes = share.usable_share * gpu.memory_bytes - share.reserve_bytes - shape.weight_bytes / tp
    return int(free_bytes // (shape.kv_bytes_per_token / shape.kv_shards(tp)))
