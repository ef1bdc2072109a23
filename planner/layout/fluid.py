"""Layouts by an integer programme in which load flows like a fluid, solved with SCIP: candidates for the simulation.

A session takes P(n) seconds of prefill on a replica of degree n, and D(n) seconds of a full decode batch. Every second
of a replica is used. Decode replicas also prefill, as the online routing lets them; without prefill replicas the
layout is co-located. For x(n), y(n) replicas and session rates of remote prefill r(n), local prefill l(n), decode d(n):

    r(n) P(n) <= x(n),   l(n) P(n) + d(n) D(n) <= y(n),   sum r(n) + l(n) = sum d(n) = rate
    sum n (x(n) + y(n)) <= GPUs,   sum y(n) kv(n) >= rate * KV of a session (token seconds), the same for KV stores

The rate is maximised. A degree whose idle replica misses a target in
too many rounds gets none of that phase. Queues are left out, so the rate is an upper bound, and only a simulation can
tell how much of it a layout carries. `Costs.with_queues` is a better guess of that: it takes the share of a replica's
time that prefills can use before too many of them wait too long, by the formula of a single queue in heavy traffic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from typing import Any

from pyscipopt import Model, quicksum

from ampd.types import Parallelism
from planner.layout.capacity import Phase, Question, full_rate, mean_stay
from planner.layout.formulation import exclude, solved
from planner.layout.layout import Layout, replicas_of
from planner.layout.search import PlanCase, even_choice
from workloads.trace import Session

_SESSIONS = 100
"""Most sessions of the trace from which costs are computed."""
_DECODE_SHARE = 0.9
"""The share of a full decode batch that replicas can keep up, because load is uneven over time and replicas."""
_LEAST_SHARE = 0.1
_WORTH_A_TRIAL = 0.45
"""A proposal whose bound is below this share of the best one is left out."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The time and the memory that a session takes.

    Attributes:
        prefill_s, decode_s: degree -> seconds of a replica for one session. Degrees that cannot keep a target lack.
        memories: (tokens of a replica by degree, token seconds of a session), for each kind of memory that is limited.
        usable: degree -> the share of a replica's time that prefills can use.
    """

    degrees: tuple[int, ...]
    prefill_s: Mapping[int, float]
    decode_s: Mapping[int, float]
    memories: Sequence[tuple[Mapping[int, float], float]]
    usable: Mapping[int, float] = field(default_factory=dict)

    def with_queues(self) -> Costs:
        """The costs with the time that must stay idle, so that rates are about those that simulations find."""
        prefill_s = {n: seconds / self.usable.get(n, 1.0) for n, seconds in self.prefill_s.items()}
        return replace(
            self, prefill_s=prefill_s, decode_s={n: seconds / _DECODE_SHARE for n, seconds in self.decode_s.items()}
        )

    def bound(self, layout: Layout) -> float:
        """About the fluid rate of a layout, without memory: all replicas share the work as their speeds allow."""
        prefilled = sum(count / self.prefill_s[n] for n, count in layout.prefill if n in self.prefill_s)
        owners = [*layout.decode, *layout.mixed]
        decoded = sum(count / self.decode_s[n] for n, count in owners if n in self.decode_s)
        both = sum(
            count / (self.prefill_s[n] + self.decode_s[n])
            for n, count in owners
            if n in self.prefill_s and n in self.decode_s
        )
        if not decoded or prefilled >= decoded:
            return decoded
        # Of every session, the share `remote` is prefilled elsewhere, so the owners' time goes into the rest.
        local_s = 1 / both - 1 / decoded if both else 0.0
        return (1 + prefilled * local_s) * both if both else min(prefilled, decoded)


def costs_of(case: PlanCase) -> Costs:
    """The costs of the mean session."""
    sessions = even_choice(case.sessions, _SESSIONS)
    stay = mean_stay(sessions, case.model)
    seconds: dict[Phase, dict[int, float]] = {"prefill": {}, "decode": {}}
    for degree in case.degrees:
        for phase in seconds:
            question = Question(
                phase,
                degree,
                sessions,
                case.model,
                case.ordering,
                case.slicing,
                case.slo,
                case.options,
                case.kv_capacity_tokens[degree],
            )
            seconds[phase][degree] = 1 / full_rate(question)
    running = {degree: float(tokens) for degree, tokens in case.kv_capacity_tokens.items() if tokens}
    memories = []
    if len(running) == len(case.degrees):
        memories.append((running, stay.running_token_s if case.kv_store_tokens else stay.resident_token_s))
    if case.kv_store_tokens:
        stores = {degree: float(tokens) for degree, tokens in case.kv_store_tokens.items()}
        memories.append((stores, stay.resident_token_s))
    prefill, decode = (
        {degree: table[degree] for degree in _able(case, sessions, phase)} for phase, table in seconds.items()
    )
    usable = {degree: _usable_share(case, sessions, degree) for degree in prefill}
    return Costs(case.degrees, prefill, decode, [memory for memory in memories if memory[1] > 0], usable)


def _usable_share(case: PlanCase, sessions: Sequence[Session], degree: int) -> float:
    """The utilisation at which the wait of a prefill leaves as many rounds in time as wanted.

    In a single queue, about `u exp(-2 (1 - u) t E[S] / E[S^2])` of the prefills wait longer than t at utilisation u.
    """
    prompts = [pair for session in sessions for pair in session.computed_tokens()]
    seconds = [case.model.prefill_s(hist, incr, Parallelism(degree)) for hist, incr in prompts]
    mean_s = sum(seconds) / len(seconds)
    waits = max(case.slo.ttft_s - mean_s, 0.0) * sum(seconds) / sum(each * each for each in seconds)
    allowed = max(1 - case.attainment, 0.01)
    low, high = _LEAST_SHARE, 1.0
    while high - low > 0.01:
        middle = (low + high) / 2
        if middle * exp(-2 * (1 - middle) * waits) <= allowed:
            low = middle
        else:
            high = middle
    return low


def _able(case: PlanCase, sessions: Sequence[Session], phase: Phase) -> list[int]:
    """The degrees that can keep the phase's target in enough rounds on an idle replica; all, if none can."""

    def share(degree: int) -> float:
        theta, model = Parallelism(degree), case.model
        prompts = [pair for session in sessions for pair in session.prompts_tokens()]
        if phase == "prefill":
            met = [model.prefill_s(hist, incr, theta) <= case.slo.ttft_s for hist, incr in prompts]
        else:
            met = [model.decode_step_s(1, hist + incr, theta) <= case.slo.itl_s for hist, incr in prompts]
        return sum(met) / len(met)

    able = [degree for degree in case.degrees if share(degree) >= case.attainment]
    return able or list(case.degrees)


def most_rate(
    costs: Costs,
    gpus: int,
    prefill: Collection[int] | None = None,
    decode: Collection[int] | None = None,
    excluded: Sequence[Layout] = (),
    *,
    has_local: bool = True,
) -> tuple[Layout, float] | None:
    """The layout with the highest rate, and that rate; None: no layout fits.

    Args:
        prefill, decode: the degrees to use; None: all. No prefill degree: a co-located layout.
        excluded: layouts that are not wanted again.
        has_local: decode replicas prefill too. Without, the programme balances the phases.
    """
    return _Programme(costs, gpus, prefill, decode, excluded, has_local).most_rate()


def fewest_gpus(costs: Costs, gpus: int, rate: float) -> int | None:
    """The GPUs that a rate needs at least; None: these are too few."""
    return _Programme(costs, gpus, None, None, (), has_local=True).fewest_gpus(rate)


def proposals(costs: Costs, gpus: int, more: int = 3) -> list[Layout]:
    """Different layouts for the simulation to choose from, the most promising first.

    The best co-located layout of each degree, the best split of each pair of degrees, and the `more` best of all.
    """
    if gpus < min(costs.degrees):
        return []
    found: dict[Layout, float] = {}
    for prefill, decode in _combinations(costs, gpus):
        # Splits that only local prefills make equal are many. The balanced one is another good guess.
        for has_local in (True, False) if prefill else (True,):
            if (solution := most_rate(costs, gpus, prefill, decode, has_local=has_local)) is not None:
                found.setdefault(*solution)
    best: list[Layout] = []
    while len(best) < more and (solution := most_rate(costs, gpus, excluded=best)) is not None:
        best.append(solution[0])
        found.setdefault(*solution)
    highest = max(found.values(), default=0.0)
    promising = [layout for layout, rate in found.items() if rate >= _WORTH_A_TRIAL * highest]
    return sorted(promising, key=lambda layout: -found[layout])


def _combinations(costs: Costs, gpus: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for decode in costs.decode_s:
        if decode in costs.prefill_s:
            yield (), (decode,)
        for prefill in costs.prefill_s:
            if prefill + decode <= gpus:
                yield (prefill,), (decode,)


class _Programme:
    """One programme with its variables. Rates are in units of what one replica can do at most.

    SCIP's tolerances are absolute, so its numbers must be near 1.
    """

    def __init__(
        self,
        costs: Costs,
        gpus: int,
        prefill: Collection[int] | None,
        decode: Collection[int] | None,
        excluded: Sequence[Layout],
        has_local: bool,
    ) -> None:
        self._model = model = Model()
        model.hideOutput()
        model.setParam("parallel/maxnthreads", 1)
        self._x = self._replicas("prefill", gpus, costs.prefill_s, prefill)
        self._y = self._replicas("decode", gpus, costs.decode_s, decode)
        self._unit = 1 / min((*costs.prefill_s.values(), *costs.decode_s.values()))
        self._rate = model.addVar(lb=0.0, name="rate")
        self._gpus = quicksum(n * count for counts in (self._x, self._y) for n, count in counts.items())
        model.addCons(self._gpus <= gpus)
        model.addCons(quicksum(self._y.values()) >= 1)
        if prefill:
            model.addCons(quicksum(self._x.values()) >= 1)
        self._flow(costs, has_local)
        for tokens, token_s in costs.memories:
            held = quicksum(tokens[n] / (token_s * self._unit) * count for n, count in self._y.items())
            model.addCons(held >= self._rate)
        for layout in excluded:
            exclude(model, self._x, self._y, layout, gpus)

    def most_rate(self) -> tuple[Layout, float] | None:
        self._model.setObjective(self._rate, "maximize")
        if not solved(self._model):
            return None
        x, y = ({n: round(self._model.getVal(v)) for n, v in counts.items()} for counts in (self._x, self._y))
        return Layout(replicas_of(x), replicas_of(y)), self._model.getVal(self._rate) * self._unit

    def fewest_gpus(self, rate: float) -> int | None:
        self._model.addCons(self._rate >= rate / self._unit)
        self._model.setObjective(self._gpus, "minimize")
        return round(self._model.getObjVal()) if solved(self._model) else None

    def _replicas(
        self, name: str, gpus: int, able: Mapping[int, float], wanted: Collection[int] | None
    ) -> dict[int, Any]:
        return {
            n: self._model.addVar(vtype="I", lb=0, ub=gpus // n, name=f"{name}{n}")
            for n in able
            if wanted is None or n in wanted
        }

    def _flow(self, costs: Costs, has_local: bool) -> None:
        """The session rates of each phase, and the seconds that they take."""
        model, prefill_s, decode_s = self._model, costs.prefill_s, costs.decode_s
        prefilled, decoded = [], []
        for n, count in self._x.items():
            remote = model.addVar(lb=0.0)
            model.addCons(remote * (prefill_s[n] * self._unit) <= count)
            prefilled.append(remote)
        for n, count in self._y.items():
            decode = model.addVar(lb=0.0)
            used = decode * (decode_s[n] * self._unit)
            decoded.append(decode)
            if has_local and n in prefill_s:
                local = model.addVar(lb=0.0)
                model.addCons(local <= decode)
                used += local * (prefill_s[n] * self._unit)
                prefilled.append(local)
            model.addCons(used <= count)
        model.addCons(quicksum(prefilled) >= self._rate)
        model.addCons(quicksum(decoded) >= self._rate)
