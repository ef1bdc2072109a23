"""The simulated deployment: groups of equal replicas for prefill and decode."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampd.errors import UserError
from ampd.types import Parallelism

_GROUP = re.compile(r"(\d+)x(?:TP)?(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Equal worker replicas.

    Attributes:
        kv_capacity_tokens: KV memory of one replica; 0: unlimited.
        kv_store_tokens: host memory of one replica for sessions between rounds; 0: no store, they stay in KV memory.
    """

    replicas: int
    parallelism: Parallelism
    kv_capacity_tokens: int = 0
    kv_store_tokens: int = 0

    @property
    def gpus(self) -> int:
        return self.replicas * self.parallelism.tp

    def __str__(self) -> str:
        return f"{self.replicas}xTP{self.parallelism.tp}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A deployment. Without prefill workers it is co-located: decode workers do all the prefills themselves.

    Attributes:
        max_context_tokens: longest context of the model; 0: unlimited.
    """

    decode: tuple[ReplicaGroup, ...]
    prefill: tuple[ReplicaGroup, ...] = ()
    max_context_tokens: int = 0

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in (*self.prefill, *self.decode))

    @property
    def is_colocated(self) -> bool:
        return not self.prefill

    def colocated(self) -> Cluster:
        """The same replicas, each doing both phases."""
        return replace(self, decode=merged((*self.prefill, *self.decode)), prefill=())

    def __str__(self) -> str:
        prefill, decode = ("+".join(map(str, groups)) for groups in (self.prefill, self.decode))
        return f"prefill {prefill}, decode {decode}" if self.prefill else f"co-located {decode}"


def merged(groups: Sequence[ReplicaGroup]) -> tuple[ReplicaGroup, ...]:
    """Equal replicas joined into one group, the smallest degree first."""
    replicas = Counter[tuple[int, int, int]]()
    for group in groups:
        replicas[group.parallelism.tp, group.kv_capacity_tokens, group.kv_store_tokens] += group.replicas
    return tuple(
        ReplicaGroup(count, Parallelism(tp), capacity, store)
        for (tp, capacity, store), count in sorted(replicas.items())
    )


def parse_groups(text: str, flag: str) -> tuple[tuple[int, Parallelism], ...]:
    """(replicas, parallelism) of a text such as `2xTP4` or `2xTP4,1xTP8`; `0` or `none`: no group.

    Raises:
        UserError: the text does not fit; the line names `flag`.
    """
    if text.strip().lower() in ("", "0", "none"):
        return ()
    groups = [_GROUP.fullmatch(part.strip()) for part in text.split(",")]
    pairs = [(int(match[1]), Parallelism(int(match[2]))) for match in groups if match]
    if len(pairs) < len(groups) or any(replicas < 1 or theta.tp < 1 for replicas, theta in pairs):
        raise UserError(f"{flag}: give replicas and their tensor parallelism as 2xTP4 or 2xTP4,1xTP8 (given: {text!r})")
    return tuple(pairs)
