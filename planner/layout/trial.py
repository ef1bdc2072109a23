"""Trials: simulations of whole clusters with the online policies, from which a plan decides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

from ampd.perf.model import PerformanceModel
from ampd.perf.scaled import ScaledModel
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.types import Slo
from planner.layout.case import PlanCase
from planner.layout.layout import Layout
from planner.simulator.options import Policies
from planner.simulator.outcome import SimulatedRound
from planner.simulator.simulate import simulate
from planner.sustained import IN_TIME, end_s, in_time_share, longest_s, time_at_targets_s
from workloads.results import meets
from workloads.retime import retime
from workloads.trace import Session


@dataclass(frozen=True, slots=True)
class Horizon:
    """The length of a trial.

    Attributes:
        arrivals_s, lifetimes: arrivals last `arrivals_s` seconds and `lifetimes` times as long as a session at its
            targets.
        least_sessions: at least this many sessions arrive.
        most_rounds: at most about this many rounds arrive, unless `least_sessions` sessions have more. Arrivals of
            `_FILLS` lifetimes may have `_LIFETIME` times as many rounds, because a shorter trial would not fill the
            cluster.
    """

    arrivals_s: float
    lifetimes: float
    least_sessions: int
    most_rounds: int

    def sessions(self, case: PlanCase, rate: float) -> int:
        """Sessions of a trial."""
        rounds, lifetime_s = _means(case.sessions, case.slo)
        wanted = rate * max(self.arrivals_s, self.lifetimes * lifetime_s)
        most = self.most_rounds / rounds
        lifetime = min(_FILLS * rate * lifetime_s, wanted, _LIFETIME * most)
        return int(max(min(wanted, most), lifetime, self.least_sessions))


SHORT = Horizon(30.0, 2.0, 40, 600)
"""Of the search, which tries many layouts."""
LONG = Horizon(60.0, 3.0, 100, 3000)
"""Of the figures that a plan shows. Work that piles up shows after several lifetimes of a session only."""
ONCE = Horizon(30.0, 1.0, 300, 1500)
"""Of the single check of a cluster that is too large for longer trials."""


RANKS = 0.15
"""Of layouts that are compared: until it stops, a trial that fails still tells which layout is better."""
DECIDES = 0.05
"""Where only the answer counts, and by how much it is missed near the highest rate."""


@dataclass(frozen=True, slots=True)
class Variation:
    """How a trial differs from the case.

    Attributes:
        rate: factor of the session rate.
        seconds: factor of the times of the engines. The policies still predict with the model's times.
        tokens: factor of the prompts' new tokens.
    """

    name: str = ""
    rate: float = 1.0
    seconds: float = 1.0
    tokens: float = 1.0


AS_PLANNED = Variation()


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of one simulation, as shares.

    Attributes:
        met: rounds within both targets.
        late, slow: rounds that were served and missed the TTFT target, and the ITL target.
        in_time: sessions that ended in time (`planner.sustained`).
        is_whole: the simulation ran to its end. Otherwise it stopped because too many rounds had missed.
        result: the keys of a simulation's result, if asked for.
        refused: rounds that no replica or the model can take, with those of the same sessions that never came after
            them.
    """

    met: float
    late: float
    slow: float
    in_time: float
    is_whole: bool = True
    result: dict[str, Any] | None = None
    refused: float = 0.0

    def carries(self, attainment: float) -> bool:
        """Whether enough rounds met their targets, and enough sessions ended in time."""
        return self.is_whole and self.met >= attainment and self.in_time >= IN_TIME


@dataclass(frozen=True, slots=True)
class TrialTask:
    """One trial to make.

    Attributes:
        margin: end early when the share of the rounds that missed is this much above the allowed share; None: never.
        keeps_result: the outcome has the keys of a simulation's result.
    """

    layout: Layout
    rate: float
    horizon: Horizon
    seed: int
    margin: float | None = RANKS
    keeps_result: bool = False
    variation: Variation = AS_PLANNED

    def run(self, case: PlanCase, end_s: float = inf) -> Trial:
        """Simulate.

        Raises:
            TimeOverError: the monotonic clock is at `end_s`, and the simulation has not ended.
        """
        rate = self.rate * self.variation.rate
        count = self.horizon.sessions(case, rate)
        sessions = retime(_longer(case.sessions[:count], self.variation.tokens), rate, self.seed, count)
        allowed = None if self.margin is None else self.margin + 1 - case.attainment
        watch = _Watch(sessions, case.slo, allowed, end_s)
        try:
            run = simulate(
                sessions,
                self.layout.cluster(
                    case.kv_capacity_tokens, case.model.profile.max_context_tokens or 0, case.kv_store_tokens
                ),
                _slower(case.model, self.variation.seconds),
                Policies(
                    create_named("binding", defaults.BINDING),
                    create_named("routing", case.routing),
                    create_named("ordering", case.ordering),
                    create_named("slicing", case.slicing),
                ),
                case.slo,
                case.options,
                on_round=watch,
                belief=case.model,
            )
        except _TooManyMissedError:
            return watch.trial(0.0, is_whole=False)
        result = run.result(case.slo, case.model.profile.kv_bytes_per_token) if self.keeps_result else None
        return watch.trial(in_time_share(run.rounds, sessions, case.slo), result=result)


_FILLS = 2
_LIFETIME = 4
_OVERDUE = 0.1
"""A trial also stops when more than this share of its sessions is overdue. A rate is carried with 1 %."""


class TimeOverError(Exception):
    """The time for trials is over."""


class _TooManyMissedError(Exception):
    """Enough of a trial was simulated."""


class _Watch:
    """Counts the rounds of a trial, and stops it when too many have missed, or too many sessions are overdue.

    Args:
        share: of the rounds that may miss; None: the trial never stops.
        end_s: the monotonic time at which the trial is given up.
    """

    def __init__(self, sessions: Sequence[Session], slo: Slo, share: float | None, end_s: float) -> None:
        self._slo = slo
        self._end_s = end_s
        self._due = sum(len(session.rounds) for session in sessions)
        self._allowed = self._due if share is None else share * self._due
        self._met = self._late = self._slow = self._missed = self._refused = self._never_came = 0
        self._rounds = {session.session_id: len(session.rounds) for session in sessions}
        self._allowed_overdue = len(sessions) * (1.0 if share is None else _OVERDUE)
        # Once per session: each of its rounds asks.
        self._in_time = {session.session_id: (session.arrival_s, longest_s(session, slo)) for session in sessions}
        self._overdue: set[str] = set()

    def __call__(self, record: SimulatedRound) -> None:
        if time.monotonic() >= self._end_s:
            raise TimeOverError
        arrival_s, most_s = self._in_time[record.session_id]
        if end_s(record) - arrival_s > most_s:
            self._overdue.add(record.session_id)
            if len(self._overdue) > self._allowed_overdue:
                raise _TooManyMissedError
        if meets(record, self._slo):
            self._met += 1
            return
        self._missed += 1
        if record.error is not None:
            # A refused round ends its session.
            never_came = self._rounds[record.session_id] - record.index - 1
            self._refused += 1 + never_came
            self._never_came += never_came
        else:
            self._late += not self._slo.ttft_met(record.ttft_s)
            self._slow += not self._slo.itl_met(record.itl_s)
        if self._missed > self._allowed:
            raise _TooManyMissedError

    def trial(self, in_time: float, *, is_whole: bool = True, result: dict[str, Any] | None = None) -> Trial:
        """The counts as shares of the rounds that were due. If it stopped, misses of those known."""
        due = self._due
        seen = due if is_whole else self._met + self._missed + self._never_came
        shares = (self._late / seen, self._slow / seen)
        return Trial(self._met / due, *shares, in_time, is_whole, result, self._refused / seen)


@cache
def _means(sessions: tuple[Session, ...], slo: Slo) -> tuple[float, float]:
    """The means over sessions of the rounds, and of the seconds that they take at the targets."""
    rounds = sum(len(session.rounds) for session in sessions)
    seconds = sum(time_at_targets_s(session, slo) for session in sessions)
    return rounds / len(sessions), seconds / len(sessions)


def _slower(model: PerformanceModel, factor: float) -> PerformanceModel:
    return model if factor == 1.0 else ScaledModel(model, prefill=factor, decode=factor)


def _longer(sessions: Sequence[Session], factor: float) -> Sequence[Session]:
    """The sessions with longer prompts. The part of the context that a round keeps grows as much."""
    if factor == 1.0:
        return sessions
    return [_longer_session(session, factor) for session in sessions]


def _longer_session(session: Session, factor: float) -> Session:
    rounds = []
    context = 0
    for item, (hist, _) in zip(session.rounds, session.prompts_tokens(), strict=True):
        kept = None if item.keep_tokens is None else min(round(hist * factor), context)
        longer = item.model_copy(update={"incr_tokens": max(round(item.incr_tokens * factor), 1), "keep_tokens": kept})
        context = (context if kept is None else kept) + longer.incr_tokens + longer.output_tokens
        rounds.append(longer)
    return session.model_copy(update={"rounds": tuple(rounds)})
