"""The programme of the paper: curves by simulation, layouts by SCIP, each checked by a simulation of the cluster.

`ampd plan` does not use it, because it takes every prefill as remote, knows no co-located layouts, and may be far from
the best. `benchmarks/policies` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ampd.policies import defaults
from ampd.policies.registry import create_named
from benchmarks.paper_plan.curve_cache import CurveCache, digest_sessions, key_of
from benchmarks.paper_plan.load_curves import LEVELS, LoadCurve, Question, load_curve
from benchmarks.paper_plan.programme import Capacities, Choice, best_layouts
from planner.layout.fluid import demand_of, even_choice
from planner.layout.layout import Layout, PlanCase
from planner.parallel import in_parallel
from planner.simulator.options import Policies
from planner.simulator.simulate import simulate
from workloads.trace import Session, retime

_CURVE_SESSIONS = 300
"""Most sessions of the trace in the simulation of a curve. Of a longer trace they are an even choice."""
_CHECK_SESSIONS = (300, 1500)
_CHECK_S = 30.0
"""Seconds of arrivals in the check of the full cluster, within `_CHECK_SESSIONS` sessions."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A layout that SCIP chose, and the result of simulating the whole cluster with it."""

    choice: Choice
    simulated: dict[str, Any]

    @property
    def attainment(self) -> float:
        return self.simulated["attainment"]["rounds"] or 0.0


def checked_layouts(case: PlanCase, top: int, cache: CurveCache, jobs: int | None) -> list[Checked]:
    """The `top` layouts of the programme, the one that attains most first. There are none if none fits the GPUs."""
    choices = best_layouts(simulated_capacities(case, cache, jobs), demand_of(case), case.gpus, top)
    results = in_parallel(partial(check, case), [choice.layout for choice in choices], "checking layouts", jobs)
    checked = [Checked(choice, result) for choice, result in zip(choices, results, strict=True)]
    # With equal attainment more head-room is better. A lower level is head-room too.
    return sorted(checked, key=lambda entry: (-round(entry.attainment, 3), entry.choice.level, -entry.choice.headroom))


def simulated_capacities(case: PlanCase, cache: CurveCache, jobs: int | None) -> Capacities:
    """The load that one replica of each degree carries, from the cache or by simulation."""
    sessions = even_choice(case.sessions, _CURVE_SESSIONS)
    digest = digest_sessions(sessions)
    questions = [
        Question(
            phase,
            degree,
            sessions,
            case.model,
            case.ordering,
            case.slicing,
            case.slo,
            case.options,
            capacity,
            case.kv_store_tokens.get(degree, 0),
        )
        for degree, capacity in case.kv_capacity_tokens.items()
        for phase in ("prefill", "decode")
    ]
    curves: dict[str, LoadCurve] = {}
    keys = [key_of(question, digest) for question in questions]
    for key in keys:
        if (known := cache.get(key)) is not None:
            curves[key] = known
    missing = [(key, question) for key, question in zip(keys, questions, strict=True) if key not in curves]
    # The slowest first, so that no core ends with a long one alone.
    missing.sort(key=lambda pair: -pair[1].degree)
    found = in_parallel(load_curve, [question for _, question in missing], "simulating replicas", jobs)
    for (key, _), curve in zip(missing, found, strict=True):
        curves[key] = curve
        cache.put(key, curve)
    tables: dict[str, dict[int, list[float]]] = {"prefill": {}, "decode": {}}
    for key, question in zip(keys, questions, strict=True):
        tables[question.phase][question.degree] = [curves[key].capacity(level) for level in LEVELS]
    # Each replica has each shared prefix once.
    prefixes = prefix_tokens(case.sessions)
    memory = {degree: float(capacity or 1 << 40) for degree, capacity in case.kv_capacity_tokens.items()}
    return Capacities(
        LEVELS,
        tables["prefill"],
        tables["decode"],
        {degree: max(tokens - prefixes, 1.0) for degree, tokens in memory.items()},
        {degree: max(tokens - prefixes, 1) for degree, tokens in case.kv_store_tokens.items()},
    )


def prefix_tokens(sessions: Iterable[Session]) -> int:
    """Tokens of all prefixes that sessions share, each counted once."""
    longest: dict[str, int] = {}
    for prefix in (session.shared_prefix for session in sessions):
        if prefix is not None:
            longest[prefix.id] = max(prefix.tokens, longest.get(prefix.id, 0))
    return sum(longest.values())


def check(case: PlanCase, layout: Layout) -> dict[str, Any]:
    """The shared keys of a full-cluster simulation with the online policies."""
    fewest, most = _CHECK_SESSIONS
    count = int(min(max(fewest, case.rate * _CHECK_S), most))
    sessions = retime(case.sessions, case.rate, case.options.seed, count)
    policies = Policies(
        create_named("binding", defaults.BINDING),
        create_named("routing", case.routing),
        create_named("ordering", case.ordering),
        create_named("slicing", case.slicing),
    )
    run = simulate(sessions, case.cluster_of(layout), case.model, policies, case.slo, case.options)
    return run.result(case.slo, case.model.profile.kv_bytes_per_token)
