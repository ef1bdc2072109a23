"""The sets of roles that a pools policy considered: the last ones in words, and counts for metrics."""

from __future__ import annotations

import logging
from collections import Counter

from ampd.policies.considered import Considered
from ampd.telemetry.metrics import names

log = logging.getLogger(__name__)


class ConsideredRoles:
    """What a pools policy answered after it had considered several sets of roles.

    Attributes:
        last: the last answer in words; "": there was none.
        outcomes: answers by outcome.
    """

    def __init__(self) -> None:
        self.last = ""
        self.outcomes = Counter[str]()

    def add(self, considered: Considered) -> None:
        """Count and log an answer."""
        self.outcomes[_outcome(considered)] += 1
        self.last = considered_in_words(considered)
        log.info("pools: %s", self.last)

    def drop(self, why: str) -> None:
        """Count and log an answer whose changes are not made."""
        self.outcomes[names.OUTDATED] += 1
        self.last = f"an answer was dropped, because {why}: all stay"
        log.info("pools: %s", self.last)


def considered_in_words(considered: Considered) -> str:
    """The sets of roles that a policy considered, as one line: the best first."""
    tried = sorted(considered.tried, key=lambda each: -each.attained)
    listed = "; ".join(f"{each.roles}{' (now)' if each.is_now else ''} {each.attained:.1%}" for each in tried)
    verdict = f"changes of roles: {len(considered)}" if considered else "all stay"
    if considered.is_chance:
        verdict += ", because a gain may be chance"
    return f"{considered.rounds} recent rounds served again: {listed}: {verdict}"


def _outcome(considered: Considered) -> str:
    if considered:
        return names.CHANGED
    return names.CHANCE if considered.is_chance else names.KEPT
