"""What a plan decides: replicas per phase and degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampd.types import Role

Replicas = tuple[tuple[int, int], ...]
"""(degree, replicas) in ascending order of degree, without zeros."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Replicas of each tensor-parallel degree by role. With decode replicas only, the layout is co-located."""

    prefill: Replicas
    decode: Replicas
    mixed: Replicas = ()

    @property
    def groups(self) -> Mapping[Role, Replicas]:
        """The replicas by role, without roles that have none."""
        named = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}
        return {role: replicas for role, replicas in named.items() if replicas}

    @property
    def gpus(self) -> int:
        return sum(degree * replicas for group in self.groups.values() for degree, replicas in group)

    def as_dict(self) -> dict[str, Any]:
        """The layout in the form of a plan's result. Mixed replicas are listed only if there are any."""
        always = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {
            str(role): [{"tp": degree, "replicas": count} for degree, count in replicas]
            for role, replicas in (always | dict(self.groups)).items()
        } | {"gpus": self.gpus}

    def __str__(self) -> str:
        return layout_label(self.as_dict())


def layout_label(row: Mapping[str, Any]) -> str:
    """A layout of a plan's result as text: `prefill 2xTP4+1xTP8, decode 2xTP4`, or `co-located 2xTP4`."""
    groups = {role: "+".join(f"{group['replicas']}xTP{group['tp']}" for group in row.get(role, ())) for role in Role}
    if not groups[Role.PREFILL] and not groups[Role.MIXED]:
        return f"co-located {groups[Role.DECODE]}"
    return ", ".join(f"{role} {text}" for role, text in groups.items() if text)


def replicas_of(counts: Mapping[int, int]) -> Replicas:
    return tuple((degree, counts[degree]) for degree in sorted(counts) if counts[degree])
