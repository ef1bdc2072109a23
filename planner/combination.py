"""One simulation among those of a call: a mode, policies and a rate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ampd.policies import defaults
from ampd.policies.ordering.fcfs import Fcfs
from ampd.policies.pools.static import StaticPools
from ampd.policies.rivals.continuum import ContinuumOrdering
from ampd.policies.routing.always_local import AlwaysLocal
from ampd.policies.routing.always_remote import AlwaysRemote
from ampd.policies.slicing.whole import WholeSlicing


class Mode(StrEnum):
    """How the replicas are used. All modes but `disaggregated` are whole systems: they fix the policies."""

    DISAGGREGATED = "disaggregated"
    ALWAYS_REMOTE = "always-remote"
    COLOCATED = "colocated"
    CONTINUUM = "continuum"

    @property
    def is_colocated(self) -> bool:
        """Whether every replica does both phases."""
        return self in (Mode.COLOCATED, Mode.CONTINUUM)


_SYSTEMS = {
    Mode.ALWAYS_REMOTE: (AlwaysRemote.policy_name, Fcfs.policy_name),
    Mode.COLOCATED: (AlwaysLocal.policy_name, Fcfs.policy_name),
    Mode.CONTINUUM: (AlwaysLocal.policy_name, ContinuumOrdering.policy_name),
}
"""Routing and ordering of the modes that are whole systems. They run prefills whole, in the roles of the start."""


@dataclass(frozen=True, slots=True)
class Combination:
    """One simulation of a call, with the policies that it runs."""

    mode: Mode
    routing: str
    ordering: str
    rate: float | None
    slicing: str = defaults.SLICING
    pools: str = defaults.POOLS

    @classmethod
    def of(cls, mode: Mode, routing: str, ordering: str, slicing: str, pools: str, rate: float | None) -> Combination:
        """The combination of a mode with the named policies, or with its own where the mode fixes them."""
        if mode is Mode.DISAGGREGATED:
            return cls(mode, routing, ordering, rate, slicing, pools)
        return cls(mode, *_SYSTEMS[mode], rate, slicing=WholeSlicing.policy_name, pools=StaticPools.policy_name)

    @property
    def label(self) -> str:
        """A name for tables and plots, without the rate."""
        if self.mode is Mode.DISAGGREGATED:
            return " / ".join([self.routing, self.ordering, *(f"{k} {v}" for k, v in self.named.items())])
        return str(self.mode)

    @property
    def named(self) -> dict[str, str]:
        """The slicing and the pools policy, where they are not the default. Empty for modes that fix them."""
        if self.mode is not Mode.DISAGGREGATED:
            return {}
        given = {"slicing": (self.slicing, defaults.SLICING), "pools": (self.pools, defaults.POOLS)}
        return {kind: name for kind, (name, default) in given.items() if name != default}
