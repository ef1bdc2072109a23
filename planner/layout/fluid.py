"""Layouts by an integer programme in which load flows like a fluid, solved with SCIP: candidates for the simulation.

A session takes P(n) seconds of prefill on a replica of degree n, and D(n) seconds of a full decode batch. Every second
of a replica is used. Decode replicas also prefill, as the online routing lets them. Without prefill replicas the layout
is co-located. There are x(n) prefill and y(n) decode replicas. The session rates are r(n) of remote prefill, l(n) of
local prefill and d(n) of decode:

    r(n) P(n) + a(n) A(n) <= x(n),   l(n) P(n) + b(n) A(n) + d(n) D(n) <= y(n),   b(n) <= d(n)
    sum r(n) + l(n) = sum d(n) = rate,   sum n (x(n) + y(n)) <= GPUs
    sum y(n) kv(n) >= rate * KV of a session's running rounds (token seconds)
    sum y(n) kept(n) >= (rate - sum (a(n) + b(n))) * KV of a session with its tools (token seconds)

`kept` is the KV memory, or the KV store where there is one. The last line says: of a(n) + b(n) sessions per second, no
KV is kept between their rounds, and computing it again takes A(n) seconds of a replica.

The rate is maximised. If an idle replica of a degree misses the target of a phase in too many rounds, the degree gets
nothing of that phase. Queues are left out. So the rate is an upper bound, and only a simulation can tell how much of it
a layout carries. `Costs.with_queues` gives a better guess of that rate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pyscipopt import Model, quicksum

from planner.layout.costs import Costs
from planner.layout.layout import Layout, replicas_of

_BEST_OF_ALL = 3
_WORTH_A_TRIAL = 0.45
"""A proposal whose bound is below this share of the best one is left out."""


def most_rate(
    costs: Costs,
    gpus: int,
    prefill: Collection[int] | None = None,
    decode: Collection[int] | None = None,
    excluded: Sequence[Layout] = (),
    *,
    has_local: bool = True,
) -> tuple[Layout, float] | None:
    """The layout with the highest rate, and its rate; None: no layout fits.

    Args:
        prefill, decode: the degrees to use; None: all. No prefill degree: a co-located layout.
        excluded: layouts that were found before.
        has_local: decode replicas prefill too. Otherwise the programme balances the two phases.
    """
    return _Programme(costs, gpus, prefill, decode, excluded, has_local).most_rate()


def fewest_gpus(costs: Costs, gpus: int, rate: float) -> int | None:
    """The fewest GPUs that a rate needs; None: the given GPUs are too few."""
    return _Programme(costs, gpus, None, None, (), has_local=True).fewest_gpus(rate)


def proposals(costs: Costs, gpus: int) -> list[Layout]:
    """Different layouts for the simulation to choose from, the most promising first.

    The best co-located layout of each degree, the best split of each pair of degrees, and the best of all.
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
    while len(best) < _BEST_OF_ALL and (solution := most_rate(costs, gpus, excluded=best)) is not None:
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
            model.addCons(self._held(tokens, token_s) >= self._rate)
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
        prefilled, decoded, again = [], [], []
        again_s = costs.again_s if costs.resident is not None else {}
        for n, count in self._x.items():
            remote = model.addVar(lb=0.0)
            used = remote * (prefill_s[n] * self._unit)
            prefilled.append(remote)
            if n in again_s:
                again.append(model.addVar(lb=0.0))
                used += again[-1] * (again_s[n] * self._unit)
            model.addCons(used <= count)
        for n, count in self._y.items():
            decode = model.addVar(lb=0.0)
            used = decode * (decode_s[n] * self._unit)
            decoded.append(decode)
            if has_local and n in prefill_s:
                local = model.addVar(lb=0.0)
                model.addCons(local <= decode)
                used += local * (prefill_s[n] * self._unit)
                prefilled.append(local)
                if n in again_s:
                    again.append(model.addVar(lb=0.0))
                    model.addCons(again[-1] <= decode)
                    used += again[-1] * (again_s[n] * self._unit)
            model.addCons(used <= count)
        model.addCons(quicksum(prefilled) >= self._rate)
        model.addCons(quicksum(decoded) >= self._rate)
        if costs.resident is not None:
            model.addCons(self._held(*costs.resident) + quicksum(again) >= self._rate)

    def _held(self, tokens: Mapping[int, float], token_s: float) -> Any:
        """The rate whose KV the decode replicas hold."""
        return quicksum(tokens[n] / (token_s * self._unit) * count for n, count in self._y.items())


def exclude(model: Any, x: Mapping[int, Any], y: Mapping[int, Any], layout: Layout, gpus: int) -> None:
    """A no-good cut: at least one number of replicas must be larger or smaller than in this layout."""
    differs = []
    for variables, replicas in ((x, dict(layout.prefill)), (y, dict(layout.decode))):
        for degree, variable in variables.items():
            most, value = gpus // degree, replicas.get(degree, 0)
            more, fewer = model.addVar(vtype="B"), model.addVar(vtype="B")
            model.addCons(variable >= (value + 1) * more)
            model.addCons(variable <= most - (most - value + 1) * fewer)
            differs += [more, fewer]
    model.addCons(quicksum(differs) >= 1)


def solved(model: Any) -> bool:
    """Solve, and whether there is a solution."""
    model.optimize()
    status: str = model.getStatus()
    if status == "infeasible":
        return False
    if status == "userinterrupt":
        raise KeyboardInterrupt
    if status != "optimal":
        raise RuntimeError(f"SCIP ended with the status {status}")
    return True
