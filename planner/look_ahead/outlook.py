"""What a set of roles can be expected to attain: soon, from the present state on, and later, if the load stays."""

from __future__ import annotations

from dataclasses import dataclass

from planner.look_ahead.replay import Replay


@dataclass(frozen=True, slots=True)
class Outlook:
    """The outcomes of two replays with the same roles.

    Attributes:
        soon: of the latest rounds, behind the rounds that are in progress. It shows what a change costs at first.
        later: of a longer record, from an empty cluster. It shows what the roles are worth when a change is over.
    """

    soon: Replay
    later: Replay

    @property
    def share(self) -> float:
        """The mean of both."""
        return (self.soon.share + self.later.share) / 2

    def is_better_than(self, other: Outlook, gain: float) -> bool:
        """Whether one of the two is better, and none is worse, by `gain` and not by chance.

        The latest rounds are few, and a load that lasts for seconds only looks like one that stays. So they alone must
        show a gain of three standard deviations, and not two.
        """
        if other.soon.is_better_than(self.soon, gain) or other.later.is_better_than(self.later, gain):
            return False
        return self.later.is_better_than(other.later, gain) or self.soon.is_better_than(other.soon, gain, 3.0)

    def gains(self, other: Outlook, gain: float) -> bool:
        """Whether one of the two is better by `gain`, be it by chance or at the cost of the other."""
        return self.soon.gains(other.soon, gain) or self.later.gains(other.later, gain)
