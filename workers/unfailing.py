"""Policies whose exceptions stop no worker, because a user's policy may raise anything.

Each has a fallback, and the log has one line for failures in a row.
"""

from __future__ import annotations

import logging

from ampd.policies.base import (
    OrderingPolicy,
    OrderingSituation,
    Pick,
    Run,
    SlicingPolicy,
    SlicingSituation,
    Wait,
)

log = logging.getLogger(__name__)


class _Failures:
    """Logs the first of failures in a row."""

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self._is_failing = False

    def end(self) -> None:
        self._is_failing = False

    def note(self, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            log.exception("the %s: %r", self._consequence, error)


class UnfailingOrdering:
    """An ordering policy. If it raises or picks a prefill that is not there, the first one in order of arrival runs."""

    def __init__(self, policy: OrderingPolicy) -> None:
        self._policy = policy
        self._failures = _Failures("ordering policy failed, the first prefill in order of arrival runs")

    def pick(self, situation: OrderingSituation) -> Pick:
        try:
            pick = self._policy.pick(situation)
            _check_pick(pick, len(situation.queue))
        except Exception as error:
            self._failures.note(error)
            return Run(0)
        self._failures.end()
        return pick


def _check_pick(pick: Pick, waiting: int) -> None:
    if isinstance(pick, Wait):
        return
    for position in (pick.index, *pick.together, *pick.postponed):
        if not 0 <= position < waiting:
            raise IndexError(f"position {position} of {waiting} prefills")


class UnfailingSlicing:
    """A slicing policy. If it raises, the prefills are computed whole."""

    def __init__(self, policy: SlicingPolicy) -> None:
        self._policy = policy
        self._failures = _Failures("slicing policy failed, prefills are computed whole")

    def slice(self, situation: SlicingSituation) -> int:
        try:
            tokens = self._policy.slice(situation)
        except Exception as error:
            self._failures.note(error)
            return situation.task.incr_tokens
        self._failures.end()
        return tokens
