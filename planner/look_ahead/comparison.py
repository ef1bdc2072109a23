"""Compares the present roles with others: how well each would serve the recent load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ampd.policies.base import PoolsSituation
from ampd.policies.considered import TriedRoles
from planner.look_ahead.candidates import Roles, in_words, shape
from planner.look_ahead.outlook import Outlook
from planner.look_ahead.recorded import RecordedLoad
from planner.look_ahead.replay import Replay, replay

_DOUBTFUL = 2
"""Sets of roles that serve more rounds where chance hides a gain."""


class Comparison:
    """Outlooks of sets of roles.

    Args:
        now: the present roles.
        supported: roles that a rule of thumb prefers, or the present ones.
        soon, later: the loads that are served again.
        gain: least difference of attainment that counts.
        proven: what the present roles attained by the record in the time of `later`.

    Attributes:
        present: the outlook of the present roles.
    """

    def __init__(
        self,
        situation: PoolsSituation,
        now: Roles,
        supported: Roles,
        soon: RecordedLoad,
        later: RecordedLoad,
        gain: float,
        proven: float = 0.0,
    ) -> None:
        self._situation = situation
        self._now = now
        self._supported = shape(situation.workers, supported)
        self._soon = soon
        self._later = later
        self._gain = gain
        self._others: list[tuple[Roles, Outlook]] = []
        self._left_out: list[tuple[Roles, Outlook]] = []
        self._proven = proven
        self.present = Outlook(replay(soon, now, situation), self._again(later))
        self._known = {shape(situation.workers, now): self.present}

    def outlook(self, roles: Roles) -> Outlook:
        """Serve the latest rounds with these roles, and the longer record unless the latest rounds rule them out."""
        key = shape(self._situation.workers, roles)
        if key not in self._known:
            soon = replay(self._soon, roles, self._situation)
            is_out = self.present.soon.gains(soon, self._gain)
            self._known[key] = Outlook(soon, None if is_out else replay(self._later, roles, self._situation))
        return self._known[key]

    def has_served(self, roles: Roles) -> bool:
        """Whether the loads were served with these roles already."""
        return shape(self._situation.workers, roles) in self._known

    def try_all(self, others: Iterable[Roles]) -> None:
        """Compare these roles too."""
        self._others += [(roles, self.outlook(roles)) for roles in others]

    def best(self) -> Roles | None:
        """The best of the roles that are better than the present ones; None: no roles are better."""
        better = [item for item in self._others if self._is_better(*item)]
        return max(better, key=lambda item: item[1].share)[0] if better else None

    @property
    def is_doubtful(self) -> bool:
        """Whether no roles are better, but some gain enough, perhaps by chance."""
        return self.best() is None and bool(self._gaining())

    def serve_more(self, later: RecordedLoad) -> None:
        """Compare the present roles with those that gain most once more, with more rounds."""
        doubtful = sorted(self._gaining(), key=lambda item: -item[1].share)[:_DOUBTFUL]
        self._left_out = [item for item in self._others if item not in doubtful]
        self.present = Outlook(self.present.soon, self._again(later))
        self._others = [(roles, Outlook(each.soon, replay(later, roles, self._situation))) for roles, each in doubtful]

    def tried(self) -> list[TriedRoles]:
        """The sets of roles that were tried, for logs. The present roles come first."""
        tried = [TriedRoles(in_words(self._now), self.present.share, is_now=True)]
        return tried + [TriedRoles(in_words(roles), each.share) for roles, each in self._others + self._left_out]

    def _again(self, later: RecordedLoad) -> Replay:
        """Replay `later` with the present roles. It was recorded with them, so what they attained is proven."""
        return replace(replay(later, self._now, self._situation), proven=self._proven)

    def _is_better(self, roles: Roles, outlook: Outlook) -> bool:
        is_supported = shape(self._situation.workers, roles) == self._supported
        return outlook.is_better_than(self.present, self._gain, is_supported=is_supported)

    def _gaining(self) -> list[tuple[Roles, Outlook]]:
        """The roles that more rounds may show to be better: `later` was replayed, and one of the two replays gains."""
        return [item for item in self._others if item[1].later is not None and item[1].gains(self.present, self._gain)]
