"""One simulation among those of a call: a mode, policies and a rate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """How the replicas are used."""

    DISAGGREGATED = "disaggregated"
    ALWAYS_REMOTE = "always-remote"
    COLOCATED = "colocated"
    CONTINUUM = "continuum"


WHOLE = "whole"
STATIC = "static"
"""The slicing and the pools policy that need no mention."""


@dataclass(frozen=True, slots=True)
class Combination:
    """One simulation of a call."""

    mode: Mode
    routing: str
    ordering: str
    rate: float | None
    slicing: str = WHOLE
    pools: str = STATIC

    @property
    def label(self) -> str:
        """A name for tables and plots, without the rate."""
        if self.mode is Mode.DISAGGREGATED:
            return " / ".join([self.routing, self.ordering, *(f"{k} {v}" for k, v in self.named.items())])
        return str(self.mode)

    @property
    def named(self) -> dict[str, str]:
        """The slicing and the pools policy, as far as they are not the default."""
        given = {"slicing": (self.slicing, WHOLE), "pools": (self.pools, STATIC)}
        return {kind: name for kind, (name, default) in given.items() if name != default}
