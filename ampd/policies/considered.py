"""The answer of a pools policy that says which sets of roles it has considered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from ampd.policies.base import RoleChange


@dataclass(frozen=True, slots=True)
class TriedRoles:
    """A set of roles that a pools policy has considered.

    Attributes:
        roles: in words, as `2 prefill, 2 decode`.
        attained: the predicted attainment, as its policy weighs rounds and sessions. For `look-ahead` the mean of its
            replays, and in each of them the mean of the shares of rounds and of sessions that meet their targets.
        is_now: these are the present roles.
    """

    roles: str
    attained: float
    is_now: bool = False


class Considered(Sequence[RoleChange]):
    """The changes that are due, and the sets of roles that were considered.

    Attributes:
        rounds: how many rounds were served again.
        is_chance: no role changes although some roles gained enough, because their gain may be chance.
    """

    def __init__(
        self, changes: Sequence[RoleChange], tried: Sequence[TriedRoles], rounds: int, *, is_chance: bool = False
    ) -> None:
        self.changes = tuple(changes)
        self.is_chance = is_chance
        self.tried = tuple(tried)
        self.rounds = rounds

    @overload
    def __getitem__(self, index: int) -> RoleChange: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[RoleChange]: ...

    def __getitem__(self, index: int | slice) -> RoleChange | Sequence[RoleChange]:
        return self.changes[index]

    def __len__(self) -> int:
        return len(self.changes)
