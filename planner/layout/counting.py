"""What a trial counts: the rounds that end in a span of time, and the sessions that end or fall behind in it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ampd.types import Slo
from planner.layout.steady_load import Served
from planner.simulator.outcome import SimulatedRound
from planner.sustained import IN_TIME, TIME_FACTOR, end_s
from workloads.results import meets

_OVERDUE = 0.3
"""The margin for overdue sessions, as a part of that for rounds, because fewer of them are allowed."""


class TimeOverError(Exception):
    """The time for trials is over."""


class TooManyMissedError(Exception):
    """Enough of a trial was simulated."""


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a simulation that counts, with the sessions and rounds that are expected to end in it."""

    start_s: float
    seconds: float
    sessions: float
    rounds: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


class Limits(NamedTuple):
    """Shares of the expected rounds that may miss, and of the expected sessions that may be overdue."""

    missed: float
    overdue: float

    @classmethod
    def of(cls, attainment: float, margin: float) -> Limits:
        """Those of a rate that is carried, with a margin."""
        return cls(1 - attainment + margin, 1 - IN_TIME + _OVERDUE * margin)


class RoundCounts:
    """Rounds of a trial: how many met their targets, and why the others did not.

    Attributes:
        records: those that ended.
        due: session id -> rounds of it that count, of the sessions that ended or lost a round.
        missed: with the refused ones. late, slow: of these, the rounds that missed a target.
        refused: with the rounds of the same sessions that never came.
    """

    def __init__(self) -> None:
        self.records: list[SimulatedRound] = []
        self.due: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self.met = self.late = self.slow = self.missed = self.refused = 0

    def add(self, record: SimulatedRound, slo: Slo, left: int) -> None:
        """Count a round that ended. `left`: rounds of the session after it. They never come if this one is refused."""
        self.records.append(record)
        name = record.session_id
        self._seen[name] = self._seen.get(name, 0) + 1
        if record.error is not None:
            self._seen[name] += left
            self.missed += 1 + left
            self.refused += 1 + left
        elif meets(record, slo):
            self.met += 1
        else:
            self.missed += 1
            self.late += not slo.ttft_met(record.ttft_s)
            self.slow += not slo.itl_met(record.itl_s)
        if record.error is not None or not left:
            self.due[name] = self._seen[name]

    def add_unfinished(self, names: Sequence[str]) -> None:
        """Count a round of each of these sessions, which has not ended and is past its targets."""
        # Whether such a round has its first token is not known, so the more frequent miss is assumed.
        are_late = self.late >= self.slow
        self.missed += len(names)
        self.late += are_late * len(names)
        self.slow += (not are_late) * len(names)
        self.due |= {name: self._seen.get(name, 0) + 1 for name in names}


class Counts:
    """Counts rounds and sessions of a span, and stops the simulation when too many rounds missed or sessions are late.

    A session is overdue when it has lost more than half of its time at the targets, or of the span if that is shorter.

    Args:
        limits: beyond which the simulation stops; None: it never stops.
        over_s: the monotonic time at which the simulation is given up.
    """

    def __init__(
        self, sessions: Mapping[str, Served], slo: Slo, span: Span, limits: Limits | None, over_s: float
    ) -> None:
        self._sessions, self._slo, self._span, self._over_s = sessions, slo, span, over_s
        self._limits = limits or Limits(inf, inf)
        # Of each session in progress: when its next round is sent, that round's index, and the time that it has lost.
        self._next = {name: (served.session.arrival_s, 0, 0.0) for name, served in sessions.items()}
        self._overdue: set[str] = set()
        self._ended: list[bool] = []
        self.rounds = RoundCounts()

    def __call__(self, record: SimulatedRound) -> None:
        if time.monotonic() >= self._over_s:
            raise TimeOverError
        name = record.session_id
        served = self._sessions[name]
        ended_s, rounds = end_s(record), served.session.rounds
        lost_s = self._next[name][2] + (record.e2e_s or 0.0) - served.rounds_s[record.index]
        is_last = record.error is not None or record.index + 1 == len(rounds)
        if is_last:
            del self._next[name]
        else:
            self._next[name] = ended_s + rounds[record.index + 1].tool_s, record.index + 1, lost_s
        if ended_s < self._span.start_s:
            return
        is_late = lost_s > self._allowance_s(served)
        if is_last:
            self._ended.append(not is_late)
        if is_late:
            self._overdue.add(name)
        self.rounds.add(record, self._slo, len(rounds) - record.index - 1)
        span, limits = self._span, self._limits
        if self.rounds.missed > limits.missed * span.rounds or len(self._overdue) > limits.overdue * span.sessions:
            raise TooManyMissedError

    @property
    def overdue_share(self) -> float:
        """The sessions that are overdue, as a share of the expected ones."""
        return len(self._overdue) / self._span.sessions

    def close(self) -> float:
        """Count the rounds that are under way at the end and past their targets; returns the share of the sessions in
        time, of those that ended and those that are overdue."""
        behind, unfinished = 0, []
        for name, (sent_s, index, lost_s) in self._next.items():
            served = self._sessions[name]
            over_s = self._span.end_s - sent_s - served.rounds_s[index]
            if over_s > 0:
                unfinished.append(name)
            behind += lost_s + max(over_s, 0.0) > self._allowance_s(served)
        self.rounds.add_unfinished(unfinished)
        judged = len(self._ended) + behind
        return sum(self._ended) / judged if judged else 1.0

    def _allowance_s(self, served: Served) -> float:
        return (TIME_FACTOR - 1) * min(served.whole_s, self._span.seconds)
