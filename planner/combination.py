"""One simulation among those of a call: a mode, policies and a rate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ampd.policies import defaults


class Mode(StrEnum):
    """How the replicas are used."""

    DISAGGREGATED = "disaggregated"
    ALWAYS_REMOTE = "always-remote"
    COLOCATED = "colocated"
    CONTINUUM = "continuum"


WHOLE = "whole"
STATIC = defaults.POOLS


@dataclass(frozen=True, slots=True)
class Combination:
    """One simulation of a call."""

    mode: Mode
    routing: str
    ordering: str
    rate: float | None
    slicing: str = defaults.SLICING
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
        if self.mode is not Mode.DISAGGREGATED:
            return {}  # a system of its own
        given = {"slicing": (self.slicing, defaults.SLICING), "pools": (self.pools, STATIC)}
        return {kind: name for kind, (name, default) in given.items() if name != default}
