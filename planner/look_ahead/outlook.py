"""What a set of roles is expected to attain: soon, from the present state on, and later, if the load stays."""

from __future__ import annotations

from dataclasses import dataclass

from planner.look_ahead.replay import Replay

_DEVIATIONS_SOON, _DEVIATIONS_LATER = 3.0, 2.0
"""A gain must be this many standard deviations. If only the latest rounds show it, it must be larger, because they are
few, and a load of a few seconds looks to them like one that stays."""
_SUPPORTED = 1.0
"""This many deviations fewer are enough if a rule of thumb wants the same change, as a second, independent sign."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The outcomes of two replays with the same roles.

    Attributes:
        soon: replay of the latest rounds, behind the rounds that are in progress. It shows what a change costs at
            first.
        later: replay of a longer record, from an empty cluster. It shows what the roles are worth when a change is
            over. None: `soon` was so bad that this replay was left out.
    """

    soon: Replay
    later: Replay | None

    @property
    def share(self) -> float:
        """The mean share of both replays."""
        return self.soon.share if self.later is None else (self.soon.share + self.later.share) / 2

    @property
    def worst(self) -> float:
        """The lower share of the two replays. A higher share that the record proves counts instead of a replay's."""
        both = [self.soon] if self.later is None else [self.soon, self.later]
        return min(max(each.share, each.proven) for each in both)

    def is_better_than(self, other: Outlook, gain: float, *, is_supported: bool = False) -> bool:
        """Whether one of the two replays is better by `gain` and not by chance, and neither is worse by `gain`.

        Args:
            is_supported: a rule of thumb prefers these roles too.
        """
        if self.later is None or other.soon.gains(self.soon, gain):
            return False
        if other.later is None:
            return True
        if other.later.gains(self.later, gain):
            return False
        fewer = _SUPPORTED if is_supported else 0.0
        return self.later.is_better_than(other.later, gain, _DEVIATIONS_LATER - fewer) or self.soon.is_better_than(
            other.soon, gain, _DEVIATIONS_SOON - fewer
        )

    def gains(self, other: Outlook, gain: float) -> bool:
        """Whether one of the two replays is better by `gain`, even if by chance, and even if the other is worse."""
        if self.later is None or other.later is None:
            return self.soon.gains(other.soon, gain)
        return self.soon.gains(other.soon, gain) or self.later.gains(other.later, gain)
