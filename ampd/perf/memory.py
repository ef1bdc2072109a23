"""The KV memory of a replica: the memory that its weights leave free."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.perf.gpus import Gpu
from ampd.perf.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The part of a GPU's memory for weights and KV: a share of it, minus a reserve for activations and graphs."""

    usable_share: float = 0.9
    reserve_bytes: float = 2e9


MEMORY_SHARE = MemoryShare()


def kv_capacity_tokens(shape: ModelShape, gpu: Gpu, tp: int, share: MemoryShare = MEMORY_SHARE) -> int:
    """KV tokens of one replica beside its weights; 0 or negative: the weights leave no room."""
    free_bytes = share.usable_share * gpu.memory_bytes - share.reserve_bytes - shape.weight_bytes / tp
    return int(free_bytes // (shape.kv_bytes_per_token / shape.kv_shards(tp)))
