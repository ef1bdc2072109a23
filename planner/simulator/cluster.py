"""The simulated deployment: groups of equal replicas by role."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ampd.errors import UserError
from ampd.types import Parallelism, Role

_GROUP = re.compile(r"(\d{1,6})x(?:TP)?(\d{1,6})", re.IGNORECASE | re.ASCII)
_SEPARATOR = re.compile("[,+]")
"""Users write a comma. Plans and tables show a plus."""


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
    """A deployment. With decode workers only it is co-located: they do all the prefills of their sessions themselves.

    Attributes:
        max_context_tokens: longest context of the model; 0: unlimited.
    """

    decode: tuple[ReplicaGroup, ...]
    prefill: tuple[ReplicaGroup, ...] = ()
    max_context_tokens: int = 0
    mixed: tuple[ReplicaGroup, ...] = ()

    @property
    def groups(self) -> Mapping[Role, tuple[ReplicaGroup, ...]]:
        """The groups by role, in the order in which results list their workers."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}

    @property
    def gpus(self) -> int:
        return sum(group.gpus for groups in self.groups.values() for group in groups)

    @property
    def is_colocated(self) -> bool:
        return not self.prefill and not self.mixed

    def colocated(self) -> Cluster:
        """The same replicas, each with sessions of its own only, whose prefills it does itself."""
        every = [group for groups in self.groups.values() for group in groups]
        return replace(self, decode=merged(every), prefill=(), mixed=())

    def __str__(self) -> str:
        texts = {role: "+".join(map(str, groups)) for role, groups in self.groups.items() if groups}
        if self.is_colocated:
            return f"co-located {texts[Role.DECODE]}"
        return ", ".join(f"{role} {text}" for role, text in texts.items())


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
    """(replicas, parallelism) of a text such as `2xTP4`, `2xTP4,1xTP8`, or `2xTP4+1xTP8`; `0` or `none`: no group.

    Raises:
        UserError: the text does not fit; the line names `flag`.
    """
    if text.strip().lower() in ("", "0", "none"):
        return ()
    groups = [_GROUP.fullmatch(part.strip()) for part in _SEPARATOR.split(text)]
    pairs = [(int(match[1]), Parallelism(int(match[2]))) for match in groups if match]
    if len(pairs) < len(groups) or any(replicas < 1 or theta.tp < 1 for replicas, theta in pairs):
        raise UserError(f"{flag}: give replicas and their tensor parallelism as 2xTP4 or 2xTP4,1xTP8 (given: {text!r})")
    return tuple(pairs)
