"""The layout as an integer programme, solved with SCIP.

The paper's programme (arXiv 2602.14516, section 5) minimises Z >= tau_pre(n), tau_dec(n) over the degrees in use. As
printed it has no demand: an empty cluster is optimal, and tau does not depend on how many replicas share the load. This
module solves, for x(n), y(n) replicas of degree n for prefill and decode:

    level L: P95 latency over its target, the same for both phases
    c_pre(n, L), c_dec(n, L): session rate that one replica of degree n carries with its P95 at L or below
    1. the lowest L of a grid with     sum x(n) c_pre(n, L) >= rate,  sum y(n) c_dec(n, L) >= rate
    2. at that L the largest head-room h:  sum x(n) c_pre(n, L) >= h rate,  sum y(n) c_dec(n, L) >= h rate
    always   sum n (x(n) + y(n)) <= GPUs,  sum y(n) kv(n) >= resident KV,  sum x(n) >= 1,  sum y(n) >= 1
             with a KV store in host memory:  sum y(n) kv(n) >= running KV,  sum y(n) store(n) >= resident KV
    then     of equal layouts the one with the fewest GPUs

TTFT and ITL are comparable because each is divided by its target. The steps are separate solves, because one weighted
objective would trade them against each other by rounding. If no level carries the rate, step 2 at the highest level
gives the closest layout. Resident KV is the 95th percentile of a Poisson number of sessions of mean size in an idle
cluster. Running KV is the same for the time in which a round of the session runs, without its tools. The K best layouts
are found by no-good cuts: each solution is excluded, and the programme is solved again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyscipopt import Model, quicksum

from planner.layout.fluid import Demand, exclude, memory_needs, solved
from planner.layout.layout import Layout, replicas_of

_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Capacities:
    """The load that one replica carries, by degree.

    Attributes:
        levels: ascending.
        prefill, decode: degree -> sessions per second at each level, not falling from level to level.
        kv_tokens: degree -> KV memory of a replica.
        store_tokens: degree -> host memory of a replica's KV store; empty: replicas have no stores.
    """

    levels: tuple[float, ...]
    prefill: Mapping[int, Sequence[float]]
    decode: Mapping[int, Sequence[float]]
    kv_tokens: Mapping[int, float]
    store_tokens: Mapping[int, float] = field(default_factory=dict)

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(sorted(self.kv_tokens))


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout with its latency level and head-room.

    Attributes:
        level: index of the level that it reaches.
        headroom: the rate that it carries at that level, over the demanded rate; below 1 it misses the demand.
    """

    layout: Layout
    level: int
    headroom: float


def best_layouts(capacities: Capacities, demand: Demand, gpus: int, count: int) -> list[Choice]:
    """The `count` best layouts, best first; fewer if there are not that many, none if not even one fits."""
    found: list[Choice] = []
    while len(found) < count:
        choice = _best(capacities, demand, gpus, [choice.layout for choice in found])
        if choice is None:
            break
        found.append(choice)
    return found


def _best(capacities: Capacities, demand: Demand, gpus: int, excluded: Sequence[Layout]) -> Choice | None:
    programme = _Programme(capacities, demand, gpus, excluded)
    level = programme.lowest_level()
    last = len(capacities.levels) - 1
    headroom = programme.most_headroom(last if level is None else level)
    if headroom is None:
        return None
    layout = programme.fewest_gpus(last if level is None else level, headroom)
    # SCIP's head-room may be wrong by its tolerance. The layout's is exact.
    return choice_of(layout, capacities, demand)


class _Programme:
    """The steps of the programme. The result of each step is a constraint of the next."""

    def __init__(self, capacities: Capacities, demand: Demand, gpus: int, excluded: Sequence[Layout]) -> None:
        self._capacities, self._demand, self._gpus, self._excluded = capacities, demand, gpus, excluded

    def lowest_level(self) -> int | None:
        """Index of the lowest level that carries the rate."""
        model, x, y = self._base()
        levels = range(len(self._capacities.levels))
        chosen = [model.addVar(vtype="B", name=f"level{index}") for index in levels]
        model.addCons(quicksum(chosen) == 1)
        for index in levels:
            for variables, capacity in ((x, self._capacities.prefill), (y, self._capacities.decode)):
                carried = self._carried(capacity, variables, index)
                model.addCons(carried >= chosen[index])
        model.setObjective(quicksum(index * chosen[index] for index in levels), "minimize")
        if not solved(model):
            return None
        return next(index for index in levels if model.getVal(chosen[index]) > 0.5)

    def most_headroom(self, level: int) -> float | None:
        """The largest head-room at a level; None if no layout fits at all."""
        model, x, y = self._base()
        headroom = self._with_headroom(model, x, y, level)
        model.setObjective(headroom, "maximize")
        return float(model.getVal(headroom)) if solved(model) else None

    def fewest_gpus(self, level: int, headroom: float) -> Layout:
        """The smallest layout with this head-room."""
        model, x, y = self._base()
        model.addCons(self._with_headroom(model, x, y, level) >= headroom * (1 - _TOLERANCE))
        model.setObjective(quicksum(n * (x[n] + y[n]) for n in x), "minimize")
        if not solved(model):
            raise RuntimeError("SCIP found a layout and then found none under the same constraints")
        counts = [{n: round(model.getVal(variables[n])) for n in variables} for variables in (x, y)]
        return Layout(replicas_of(counts[0]), replicas_of(counts[1]))

    def _with_headroom(self, model: Any, x: dict[int, Any], y: dict[int, Any], level: int) -> Any:
        headroom = model.addVar(lb=0.0, name="headroom")
        for variables, capacity in ((x, self._capacities.prefill), (y, self._capacities.decode)):
            model.addCons(self._carried(capacity, variables, level) >= headroom)
        return headroom

    def _carried(self, capacity: Mapping[int, Sequence[float]], variables: dict[int, Any], level: int) -> Any:
        """The rate that a phase carries, in units of the demand, because SCIP's tolerances are absolute."""
        return quicksum(capacity[n][level] / self._demand.rate * variables[n] for n in variables)

    def _base(self) -> tuple[Any, dict[int, Any], dict[int, Any]]:
        """A fresh model with the replicas and the constraints of every step."""
        model = Model()
        model.hideOutput()
        model.setParam("parallel/maxnthreads", 1)
        degrees = self._capacities.degrees
        x, y = (
            {n: model.addVar(vtype="I", lb=0, ub=self._gpus // n, name=f"{phase}{n}") for n in degrees}
            for phase in ("prefill", "decode")
        )
        model.addCons(quicksum(n * (x[n] + y[n]) for n in degrees) <= self._gpus)
        model.addCons(quicksum(x.values()) >= 1)
        model.addCons(quicksum(y.values()) >= 1)
        # In units of the demand, because SCIP's tolerances are absolute.
        for tokens, need in memory_needs(self._capacities.kv_tokens, self._capacities.store_tokens, self._demand):
            if need:
                model.addCons(quicksum(tokens[n] / need * y[n] for n in degrees) >= 1)
        for layout in self._excluded:
            exclude(model, x, y, layout, self._gpus)
        return model, x, y


def choice_of(layout: Layout, capacities: Capacities, demand: Demand) -> Choice:
    """The lowest level at which a layout carries the rate (else the highest), and its head-room there."""
    ratios = []
    for index in range(len(capacities.levels)):
        carried = (
            sum(capacity[n][index] * count for n, count in replicas)
            for capacity, replicas in ((capacities.prefill, layout.prefill), (capacities.decode, layout.decode))
        )
        ratio = min(carried) / demand.rate
        # A rate that is missed only by rounding is carried.
        ratios.append(1.0 if 1 - _TOLERANCE <= ratio < 1 else ratio)
    level = next((index for index, ratio in enumerate(ratios) if ratio >= 1.0), len(ratios) - 1)
    return Choice(layout, level, ratios[level])
