"""Trials: simulations of whole clusters with the online policies, from which a plan decides."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import TracebackType
from typing import Any, NamedTuple, Self

from tqdm import tqdm

from ampd.progress import Progress
from ampd.types import Slo
from planner.layout.layout import Layout, Load, PlanCase, Population, Served, steady_load
from planner.parallel import Processes
from planner.simulator.outcome import SimulatedRound, SimulationRun
from planner.simulator.simulate import simulate
from workloads.results import meets

TIME_FACTOR = 1.5
IN_TIME = 0.99
"""A rate is sustained if this share of the sessions ends within `TIME_FACTOR` times their time at the targets."""
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
        first_sent_s, _, lost_s = self._next[name]
        _count_from(record, first_sent_s)
        ended_s, rounds = record.ended_s, served.session.rounds
        lost_s += (record.e2e_s or 0.0) - served.rounds_s[record.index]
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


def _count_from(record: SimulatedRound, first_sent_s: float) -> None:
    """Let a round's times begin when its client sent it first, and not when it came back after a refusal."""
    refused_s = record.sent_s - first_sent_s
    if refused_s > _ROUNDING_S and record.ttft_s is not None and record.e2e_s is not None:
        record.sent_s = first_sent_s
        record.ttft_s += refused_s
        record.e2e_s += refused_s


_ROUNDING_S = 1e-6

# -- trials


@dataclass(frozen=True, slots=True)
class Horizon:
    """The time of a trial that counts. Before it, the decode batches fill.

    Attributes:
        seconds, lifetimes: it lasts `seconds`, and `lifetimes` times as long as a session at its targets.
        least_sessions: at least as long as it takes for this many sessions to arrive.
        most_rounds: at most as long as it takes for about this many rounds, or for twice as many if that is needed for
            `_LIVES` lifetimes. It is longer if `least_sessions` sessions or `_ROUND_TIMES` rounds need it.
    """

    seconds: float
    lifetimes: float
    least_sessions: int
    most_rounds: int

    def span(self, population: Population, rate: float) -> Span:
        wanted_s = max(self.seconds, self.lifetimes * population.lifetime_s)
        most_s = self.most_rounds / rate / population.rounds
        seconds = max(
            min(wanted_s, max(most_s, min(2 * most_s, _LIVES * population.lifetime_s))),
            self.least_sessions / rate,
            _ROUND_TIMES * population.round_s,
        )
        seconds = min(seconds, _LONGEST * most_s)
        sessions = rate * seconds
        fill_s = min(_SPEED * population.start_s, _LONGEST * most_s)
        return Span(fill_s, seconds, sessions, sessions * population.rounds)


_MOST_ROUNDS = 300.0
"""Rounds per second and GPU. No layout carries as many, and a simulation of more of them would take too long."""
_ROUND_TIMES = 5
_LONGEST = 8
"""Nothing lasts longer than this number times `most_rounds`. Rates may be far too high."""
_LIVES = 2

SHORT = Horizon(30.0, 1.0, 40, 600)
"""Of the search, which tries many layouts."""
LONG = Horizon(100.0, 6.0, 100, 4000)
"""Of the figures that a plan shows. Sessions that are left behind become many only after several lifetimes."""
ONCE = Horizon(30.0, 1.0, 300, 1500)
"""Of the single simulation of a cluster that is too large for longer ones."""

_SPEED = 0.8
"""How long rounds in progress take when a trial begins, as a share of their targets.

As many sessions are in progress as if all rounds took so long, which is more than a cluster has that carries the rate
with ease. Such a cluster soon has fewer. One that does not carry the rate soon misses targets. From a lower start a
trial would have to last much longer, because the sessions that are too many come slowly.
"""


RANKS = 0.15
"""Of layouts that are compared: until it stops, a trial that fails still tells which layout is better."""
DECIDES = 0.05
"""Where only the answer counts, and by how much it is missed near the highest rate."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of one simulation, as shares.

    Attributes:
        met: rounds within both targets.
        late, slow: rounds that were served and missed the TTFT target, and the ITL target.
        in_time: sessions that ended in time. Of a trial that stopped: those that were not
            too late yet.
        is_whole: the simulation ran to its end. Otherwise it stopped because too many rounds had missed.
        result: the keys of a simulation's result, if asked for.
        refused: rounds that no replica or the model can take, with those of the same sessions that never came after
            them.
        most: the share of the rounds that it attains at most. A trial that stopped knows no more than that.
        tokens_per_s: output tokens of the rounds that ended. per_user: 1 / the mean of their mean ITLs. 0: not known.
    """

    met: float
    late: float
    slow: float
    in_time: float
    is_whole: bool = True
    result: dict[str, Any] | None = None
    refused: float = 0.0
    most: float = 1.0
    tokens_per_s: float = 0.0
    tokens_per_s_per_user: float = 0.0

    def carries(self, attainment: float) -> bool:
        """Whether enough rounds met their targets, and enough sessions ended in time."""
        return self.is_whole and self.reserve(attainment) >= 0

    def reserve(self, attainment: float) -> float:
        """The share of the rounds, or of the sessions if less, that may still fail. Negative: too many failed."""
        return min(self.met - attainment, self.in_time - IN_TIME)

    def rank(self, attainment: float) -> tuple[int, float]:
        """Sorts trials of one rate, the best first. One that was stopped is the better the more rounds it had met."""
        if not self.is_whole:
            return 2, -self.met
        return (0, -self.met) if self.carries(attainment) else (1, -self.reserve(attainment))


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

    def run(self, case: PlanCase, over_s: float = inf) -> Trial:
        """Simulate.

        Raises:
            TimeOverError: the monotonic clock is at `over_s`, and the simulation has not ended.
        """
        population = case.population
        rate = min(self.rate, _MOST_ROUNDS * self.layout.gpus / population.rounds)
        span = self.horizon.span(population, rate)
        load = self._load(case, population, rate, span.end_s)
        limits = None if self.margin is None else Limits.of(case.attainment, self.margin)
        counts = Counts(load.sessions, case.slo, span, limits, over_s)
        try:
            run = self._simulated(case, load, counts, span.end_s, span.start_s)
        except TooManyMissedError:
            return _stopped(counts.rounds, counts.overdue_share, span)
        in_time = counts.close()
        rounds = counts.rounds
        due = rounds.met + rounds.missed
        met = rounds.met / due if due else 1.0
        late, slow, refused = (each / due if due else 0.0 for each in (rounds.late, rounds.slow, rounds.refused))
        result = _result(case, run, load, rounds, span, met) if self.keeps_result else None
        return Trial(met, late, slow, in_time, True, result, refused, met, *_throughput(rounds.records, span))

    def _load(self, case: PlanCase, population: Population, rate: float, seconds: float) -> Load:
        owners = [*self.layout.decode, *self.layout.mixed]
        capacities = [case.kv_capacity_tokens[degree] for degree, _ in owners]
        limits = [max(capacities) if all(capacities) else 0, case.model.profile.max_context_tokens or 0]
        most_tokens = min((limit for limit in limits if limit), default=0)
        return steady_load(population, rate, seconds, _SPEED, self.seed, most_tokens=most_tokens)

    def _simulated(
        self,
        case: PlanCase,
        load: Load,
        on_round: Callable[[SimulatedRound], object],
        until_s: float,
        gaps_from_s: float = 0.0,
    ) -> SimulationRun:
        return simulate(
            [served.session for served in load.sessions.values()],
            case.cluster_of(self.layout),
            case.model,
            case.new_policies(),
            case.slo,
            replace(case.options, idle_tokens=load.idle_tokens, until_s=until_s, gaps_from_s=gaps_from_s),
            on_round=on_round,
        )


def _throughput(records: Sequence[SimulatedRound], span: Span) -> tuple[float, float]:
    """Output tokens per second, of all and of a user."""
    itls_s = [record.itl_s for record in records if record.itl_s]
    tokens = sum(record.output_tokens for record in records if record.error is None)
    return tokens / span.seconds, len(itls_s) / sum(itls_s) if itls_s else 0.0


def _stopped(counts: RoundCounts, overdue: float, span: Span) -> Trial:
    """The outcome of a trial that was stopped: shares of the expected rounds, and misses of those that ended.

    `overdue`: the share of the expected sessions that are too late.
    """
    seen = counts.met + counts.missed
    late, slow, refused = (each / seen for each in (counts.late, counts.slow, counts.refused))
    most = max(1 - counts.missed / span.rounds, 0.0)
    return Trial(min(counts.met / span.rounds, most), late, slow, max(1 - overdue, 0.0), False, None, refused, most)


def _result(
    case: PlanCase, run: SimulationRun, load: Load, counts: RoundCounts, span: Span, met: float
) -> dict[str, Any]:
    """The keys of a simulation's result, for the rounds that count."""
    for record in counts.records:
        record.index += load.sessions[record.session_id].begun_rounds
    counted = replace(run, rounds=counts.records, rounds_planned=counts.due, duration_s=span.seconds)
    result = counted.result(case.slo, case.model.profile.kv_bytes_per_token)
    # With the rounds that are still under way and past their targets, as in the figures of the trial.
    result["attainment"]["rounds"] = met
    return result


# -- trials on all cores, until the time is over

BUDGET_S = 60.0
"""Longest time of the trials of a plan, unless named."""


class Trials:
    """Runs the tasks of one case, in processes that know the case.

    Args:
        jobs: processes; None: one per core.
        budget_s: seconds from now after which no result is awaited.

    Attributes:
        made: how many trials were made.
    """

    def __init__(self, case: PlanCase, jobs: int | None, budget_s: float) -> None:
        self._case = case
        self.made = 0
        self._started_s = time.monotonic()
        self._budget_s = budget_s
        count = jobs or os.cpu_count() or 1
        self._processes = Processes(self._outcome, count) if count > 1 else None
        self._bar: Any = None
        self._best = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        self._end()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def run(self, tasks: Sequence[TrialTask]) -> Iterator[tuple[TrialTask, Trial]]:
        """Each task with its outcome, as soon as it is there.

        Raises:
            TimeOverError: the budget is spent.
        """
        try:
            for task, trial in self._outcomes(tasks):
                self._count()
                yield task, trial
        except BaseException:
            # Nothing waits for the trials that still run.
            self._end()
            raise

    def make(self, task: TrialTask) -> Trial:
        """The outcome of a trial without which there is no plan, even if the time is over and after one Ctrl-C."""
        self._count()
        try:
            return task.run(self._case)
        except KeyboardInterrupt:
            return task.run(self._case)

    def show(self, best: str) -> None:
        """Print the best layout so far, if the text is another one than before."""
        if best != self._best:
            self._best = best
            tqdm.write(f"best after {self.elapsed_s:.1f} s: {best}", file=sys.stderr)

    def _outcomes(self, tasks: Sequence[TrialTask]) -> Iterator[tuple[TrialTask, Trial]]:
        if self._processes is None:
            for task in tasks:
                if self.elapsed_s >= self._budget_s:
                    raise TimeOverError
                yield task, task.run(self._case, self._started_s + self._budget_s)
            return
        try:
            yield from self._processes.results(tasks, self._budget_s - self.elapsed_s)
        except TimeoutError:
            raise TimeOverError from None

    def _outcome(self, task: TrialTask) -> Trial:
        return task.run(self._case)

    def _end(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def _count(self) -> None:
        self.made += 1
        if self._bar is None:
            self._bar = Progress("simulating layouts")
        self._bar.update()
