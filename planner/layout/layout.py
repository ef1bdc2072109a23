"""What a plan decides: replicas per phase and degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampd.types import Parallelism
from planner.simulator.cluster import Cluster, ReplicaGroup

Replicas = tuple[tuple[int, int], ...]
"""(degree, replicas) in ascending order of degree, without zeros."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Replicas of each tensor-parallel degree for prefill and for decode."""

    prefill: Replicas
    decode: Replicas

    @property
    def gpus(self) -> int:
        return sum(degree * replicas for degree, replicas in (*self.prefill, *self.decode))

    def cluster(
        self, kv_capacity_tokens: Mapping[int, int], max_context_tokens: int, kv_store_tokens: Mapping[int, int]
    ) -> Cluster:

        def groups(replicas: Replicas) -> tuple[ReplicaGroup, ...]:
            return tuple(
                ReplicaGroup(count, Parallelism(degree), kv_capacity_tokens[degree], kv_store_tokens.get(degree, 0))
                for degree, count in replicas
            )

        return Cluster(groups(self.decode), groups(self.prefill), max_context_tokens)

    def as_dict(self) -> dict[str, Any]:
        """The layout as a plan's result has it."""
        return {
            phase: [{"tp": degree, "replicas": count} for degree, count in replicas]
            for phase, replicas in (("prefill", self.prefill), ("decode", self.decode))
        } | {"gpus": self.gpus}

    def __str__(self) -> str:
        return layout_label(self.as_dict())


def layout_label(row: Mapping[str, Any]) -> str:
    """A layout of a plan's result as text: `prefill 2xTP4+1xTP8, decode 2xTP4`."""
    prefill, decode = (
        "+".join(f"{group['replicas']}xTP{group['tp']}" for group in row[phase]) for phase in ("prefill", "decode")
    )
    return f"prefill {prefill}, decode {decode}"


def replicas_of(counts: Mapping[int, int]) -> Replicas:
    return tuple((degree, counts[degree]) for degree in sorted(counts) if counts[degree])
