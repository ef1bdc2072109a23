"""What a set of roles is expected to attain: soon, from the present state on, and later, if the load stays."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from planner.look_ahead.replay import Replay

_DEVIATIONS = 3.0
"""A gain must be this many standard deviations. A wrong change costs more than a late one: it takes a while to notice,
and then the roles rest for a while."""
_SUPPORTED = 1.0
"""This many deviations fewer are enough if a rule of thumb wants the same change, as a second, independent sign."""
_OUTWEIGHS = 4.0
"""A gain of the latest rounds counts although the longer record shows a loss, if it is this many times as many
rounds. After a change of the load, most of the longer record is about the load before."""


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

        `later` may be worse if `soon` gains many more rounds than `later` loses.

        Args:
            is_supported: a rule of thumb prefers these roles too.
        """
        if self.later is None or other.soon.gains(self.soon, gain):
            return False
        if other.later is None:
            return True
        lost = other.later.more_rounds(self.later)
        if other.later.gains(self.later, gain) and self.soon.more_rounds(other.soon) < _OUTWEIGHS * lost:
            return False
        deviations = _DEVIATIONS - (_SUPPORTED if is_supported else 0.0)
        return self.later.is_better_than(other.later, gain, deviations) or self.soon.is_better_than(
            other.soon, gain, deviations
        )

    def gains(self, other: Outlook, gain: float) -> bool:
        """Whether one of the two replays is better by `gain`, even if by chance, and even if the other is worse."""
        if self.later is None or other.later is None:
            return self.soon.gains(other.soon, gain)
        return self.soon.gains(other.soon, gain) or self.later.gains(other.later, gain)

    def surely_meets_more_than(self, other: Outlook) -> bool:
        """Whether it meets more rounds in both replays together, by two standard deviations."""
        pairs = [(self.soon, other.soon)]
        if self.later is not None and other.later is not None:
            pairs.append((self.later, other.later))
        won = sum(len(mine.met - theirs.met) for mine, theirs in pairs)
        lost = sum(len(theirs.met - mine.met) for mine, theirs in pairs)
        return won > lost and won - lost >= 2 * sqrt(won + lost)
