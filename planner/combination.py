"""One simulation among those of a call: a mode, policies and a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampd.policies import defaults
from ampd.policies.naming import parse_named
from ampd.policies.ordering.fcfs import Fcfs
from ampd.policies.pools.static import StaticPools
from ampd.policies.routing.always_local import AlwaysLocal
from ampd.policies.routing.always_remote import AlwaysRemote
from ampd.policies.slicing.whole import WholeSlicing


class Mode(StrEnum):
    """How the replicas are used. All modes but `disaggregated` are whole systems with policies of their own.

    `colocated` takes an ordering and a slicing where they are named. `always-remote` fixes its own.
    """

    DISAGGREGATED = "disaggregated"
    ALWAYS_REMOTE = "always-remote"
    COLOCATED = "colocated"

    @property
    def named_kinds(self) -> frozenset[str]:
        """The kinds of policies that the call may name. The mode fixes all others but the binding."""
        return _NAMED_KINDS[self]


_NAMED_KINDS = {
    Mode.DISAGGREGATED: frozenset({"routing", "ordering", "slicing", "pools"}),
    Mode.ALWAYS_REMOTE: frozenset[str](),
    Mode.COLOCATED: frozenset({"ordering", "slicing"}),
}

_SYSTEMS = {
    Mode.ALWAYS_REMOTE: (AlwaysRemote.policy_name, Fcfs.policy_name),
    Mode.COLOCATED: (AlwaysLocal.policy_name, Fcfs.policy_name),
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
    def of(
        cls, mode: Mode, routing: str, ordering: str | None, slicing: str | None, pools: str, rate: float | None
    ) -> Combination:
        """The combination of a mode with the named policies, or with its own where the mode fixes them.

        Args:
            ordering, slicing: None: not named. The mode then has its own.
        """
        if mode is Mode.DISAGGREGATED:
            return cls(mode, routing, ordering or defaults.ORDERING, rate, slicing or defaults.SLICING, pools)
        own_routing, own_ordering = _SYSTEMS[mode]
        ordering = (ordering if "ordering" in mode.named_kinds else None) or own_ordering
        slicing = (slicing if "slicing" in mode.named_kinds else None) or WholeSlicing.policy_name
        return cls(mode, own_routing, ordering, rate, slicing, StaticPools.policy_name)

    @property
    def label(self) -> str:
        """A name for tables and plots, without the rate."""
        parts = [self.routing, self.ordering]
        if self.mode is not Mode.DISAGGREGATED:
            parts = [str(self.mode), *([] if self.ordering == _SYSTEMS[self.mode][1] else [self.ordering])]
        return " / ".join([*parts, *(f"{kind} {name}" for kind, name in self.named.items())])

    @property
    def named(self) -> dict[str, str]:
        """The slicing and the pools policy, where they are not those that the mode has by itself."""
        is_split = self.mode is Mode.DISAGGREGATED
        own = {
            "slicing": defaults.SLICING if is_split else WholeSlicing.policy_name,
            "pools": defaults.POOLS if is_split else StaticPools.policy_name,
        }
        given = {"slicing": self.slicing, "pools": self.pools}
        return {kind: name for kind, name in given.items() if name != own[kind]}


def papers_note(combinations: Sequence[Combination]) -> str:
    """A sentence that tells the policy `ampd` from this system; empty if no combination has that policy."""
    named = {parse_named(text)[0] for each in combinations for text in (each.routing, each.ordering)}
    if "ampd" not in named:
        return ""
    return "The policy `ampd` is Algorithm 1 of the AMPD paper, and not this system with its default policies."
