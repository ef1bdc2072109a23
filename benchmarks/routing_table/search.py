"""Fits a routing table: coordinate descent over its cells, every step of it judged by simulation.

Twice, from a table with every round remote and from one with every round local: whole parts of the table first (a range
of an axis, a pair of ranges), then cell by cell, a part gets the other route and keeps it if more rounds meet both
targets. The better of the two results is taken; so it attains at least what either start does, on the arrivals that it
was fitted on. Cells that no round came by take the route of the nearest one that was judged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, product

from ampd_rivals.ppd.table import TableRouting
from ampd_rivals.ppd.table_file import RoutingTable

from ampd.policies.registry import create
from ampd.types import Route
from benchmarks.routing_table.case import FitCase, blank_table
from benchmarks.routing_table.table_file import with_routes
from benchmarks.routing_table.trial import Trial, rounds_attained, try_table
from planner.parallel import in_parallel

Routes = tuple[Route, ...]
Place = tuple[int, ...]

_STARTS = (Route.REMOTE, Route.LOCAL)
_OUTPUT = 2
_OTHER_AXES = (0, 1, 3)
_FRESH_SEED = 1_000_003
"""Added to the seed for arrivals that the fit has not seen."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted table, and the rounds that met both targets, as `FittedOn.rounds_attained` has them."""

    table: RoutingTable
    rounds_attained: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Descent:
    """Where one descent ended, and the cells that rounds came by with the tables that it kept."""

    routes: Routes
    attained: int
    cells: frozenset[int]


def fit_table(case: FitCase, jobs: int | None = None) -> Fit:
    """Fit a table; progress goes to stderr. The same case gives the same table on any number of processes.

    Raises:
        UserError: output scales that fall into one range.
    """
    blank = blank_table(case)
    scales = range(len(case.output_scales))
    starts = list(product(scales, _STARTS))
    descents = in_parallel(partial(_descend, case, blank), starts, "fitting", jobs)
    routes = list(blank.routes)
    for scale in scales:
        tried = [descent for (number, _), descent in zip(starts, descents, strict=True) if number == scale]
        best = max(tried, key=lambda descent: descent.attained)  # of equals the one that began all remote
        for cell, place in enumerate(_places(blank.shape)):
            if place[_OUTPUT] == scale:
                routes[cell] = best.routes[_nearest(blank, cell, best.cells)]
    table = with_routes(blank, tuple(routes))
    return Fit(table, _comparison(case, table, jobs))


def _descend(case: FitCase, blank: RoutingTable, begin: tuple[int, Route]) -> _Descent:
    scale, start = begin
    parts, judge = list(_parts(blank.shape, scale)), _judge(case, blank, scale)
    routes: Routes = (start,) * len(blank.routes)
    best = judge(routes)
    cells, tried, is_better = best.cells, {routes}, True
    while is_better and len(tried) < case.steps:
        is_better = False
        for part, route in product(parts, _STARTS):
            # Turning a cell that no round comes by changes nothing.
            turned = _with_part(routes, part & best.cells, route)
            if turned in tried or len(tried) >= case.steps:
                continue
            tried.add(turned)
            trial = judge(turned)
            if trial.attained > best.attained:
                routes, best, is_better = turned, trial, True
                cells |= trial.cells
        _say(f"from all {start}: {len(tried)} tables tried, {best.attained} rounds attained")
    return _Descent(routes, best.attained, cells)


def _judge(case: FitCase, blank: RoutingTable, scale: int) -> Callable[[Routes], Trial]:
    factor = case.output_scales[scale]
    workloads = case.workloads(factor, case.options.seed, case.rates)
    output_tokens = factor * case.mean_output_tokens

    def judge(routes: Routes) -> Trial:
        return try_table(case, workloads, TableRouting(table=with_routes(blank, routes), output_tokens=output_tokens))

    return judge


def _with_part(routes: Routes, part: frozenset[int], route: Route) -> Routes:
    return tuple(route if cell in part else old for cell, old in enumerate(routes))


def _parts(shape: Place, scale: int) -> Iterator[frozenset[int]]:
    """What is turned at once: every range of an axis, every pair of ranges, every cell, for one range of output."""
    for count in range(1, len(_OTHER_AXES) + 1):
        for axes in combinations(_OTHER_AXES, count):
            groups: dict[Place, set[int]] = {}
            for cell, place in enumerate(_places(shape)):
                if place[_OUTPUT] == scale:
                    groups.setdefault(tuple(place[axis] for axis in axes), set()).add(cell)
            yield from map(frozenset, groups.values())


@cache
def _places(shape: Place) -> tuple[Place, ...]:
    """Position on every axis, by the cell's number."""
    return tuple(product(*map(range, shape)))


def _nearest(table: RoutingTable, cell: int, known: frozenset[int]) -> int:
    """The known cell that is the fewest ranges away within the range of output, of equals the one of less load."""
    places = _places(table.shape)
    here = places[cell]

    def distance(other: int) -> tuple[int, int, int]:
        there = places[other]
        return sum(abs(a - b) for a, b in zip(here, there, strict=True)), there[-1], other

    return min((each for each in known if places[each][_OUTPUT] == here[_OUTPUT]), key=distance, default=cell)


# -- what it is good for


def _comparison(case: FitCase, table: RoutingTable, jobs: int | None) -> dict[str, int]:
    """Rounds attained with the table and on one route, also for arrivals that the fit has not seen."""
    names = ["table", "all_remote", "all_local"]
    seeds = {"": case.options.seed}
    if any(rate is not None for rate in case.rates):
        seeds["fresh_"] = case.options.seed + _FRESH_SEED
    asked = list(product(seeds.values(), names))
    counts = in_parallel(partial(_count, case, table), asked, "comparing", jobs)
    rounds = sum(len(each.rounds) for workload in case.workloads(1, case.options.seed, case.rates) for each in workload)
    found = zip(product(seeds, names), counts, strict=True)
    return {"rounds": rounds * len(case.output_scales)} | {prefix + name: count for (prefix, name), count in found}


def _count(case: FitCase, table: RoutingTable, asked: tuple[int, str]) -> int:
    seed, name = asked
    total = 0
    for scale in case.output_scales:
        routing = create("routing", name.replace("all_", "always-")) if name != "table" else None
        routing = routing or TableRouting(table=table, output_tokens=scale * case.mean_output_tokens)
        total += rounds_attained(case, case.workloads(scale, seed, case.rates), routing)
    return total


def _say(text: str) -> None:
    print(f"table: {text}", file=sys.stderr, flush=True)
