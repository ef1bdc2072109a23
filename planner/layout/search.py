"""The programme of the paper: curves by simulation, layouts by SCIP, each checked by a simulation of the cluster.

Plans do not use it. The cases that it shares with them are here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any

from ampd.perf.piecewise import PiecewiseModel
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.types import Slo
from planner.layout.cache import CurveCache, digest_sessions, key_of
from planner.layout.capacity import (
    LEVELS,
    LoadCurve,
    Question,
    load_curve,
    mean_stay,
)
from planner.layout.formulation import Capacities, Choice, Demand, best_layouts
from planner.layout.layout import Layout
from planner.parallel import in_parallel
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.simulate import simulate
from workloads.retime import retime
from workloads.trace import Session, prefix_tokens

BINDING, POOLS = defaults.BINDING, defaults.POOLS
"""Binding and pools of the check, which a plan does not choose. With the default pools the roles stay as planned."""

ATTAINMENT = 0.9
"""As in the comparison of policies."""

_CURVE_SESSIONS = 300
"""Most sessions of the trace in the simulation of a curve. Of a longer trace they are an even choice."""
_CHECK_SESSIONS = (300, 1500)
_CHECK_S = 30.0
"""Seconds of arrivals in the check of the full cluster, within `_CHECK_SESSIONS` sessions."""
_SPREAD = 1.645
"""Memory is planned for the 95th percentile of the resident sessions, a Poisson variable."""


@dataclass(frozen=True, slots=True)
class PlanCase:
    """What to plan for.

    Attributes:
        kv_capacity_tokens: KV memory of a replica by degree; 0: unlimited.
        kv_store_tokens: host memory of a replica's KV store by degree; empty: no stores.
        attainment: share of the rounds within both targets that counts as carrying a rate.
    """

    sessions: tuple[Session, ...]
    rate: float
    slo: Slo
    model: PiecewiseModel
    kv_capacity_tokens: dict[int, int]
    gpus: int
    routing: str
    ordering: str
    slicing: str
    options: SimulationOptions
    kv_store_tokens: dict[int, int] = field(default_factory=dict)
    attainment: float = ATTAINMENT

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(sorted(self.kv_capacity_tokens))


@dataclass(frozen=True, slots=True)
class Checked:
    """A layout that SCIP chose, and the result of simulating the whole cluster with it."""

    choice: Choice
    simulated: dict[str, Any]

    @property
    def attainment(self) -> float:
        return self.simulated["attainment"]["rounds"] or 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The layouts, best first, and the inputs of the choice.

    Attributes:
        next_step: (number of additional GPUs, best choice with them).
    """

    layouts: list[Checked]
    capacities: Capacities
    demand: Demand
    next_step: tuple[int, Choice] | None


def make_plan(case: PlanCase, top: int, cache: CurveCache, jobs: int | None) -> Plan:
    """Plan. The plan has no layouts if none fits the GPUs."""
    capacities = simulated_capacities(case, cache, jobs)
    demand = demand_of(case)
    choices = best_layouts(capacities, demand, case.gpus, top)
    results = in_parallel(partial(check, case), [choice.layout for choice in choices], "checking layouts", jobs)
    checked = [Checked(choice, result) for choice, result in zip(choices, results, strict=True)]
    # With equal attainment more head-room is better. A lower level is head-room too.
    checked.sort(key=lambda entry: (-round(entry.attainment, 3), entry.choice.level, -entry.choice.headroom))
    return Plan(checked, capacities, demand, _next_step(case, capacities, demand))


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


def demand_of(case: PlanCase) -> Demand:
    """The rate, and the 95th percentiles of the resident and of the running KV for sessions of mean size."""
    stay = mean_stay(case.sessions, case.model)
    return Demand(
        case.rate,
        _kv_tokens(case.rate, stay.lifetime_s, stay.resident_token_s),
        _kv_tokens(case.rate, stay.running_s, stay.running_token_s),
    )


def _kv_tokens(rate: float, seconds: float, token_s: float) -> float:
    """The 95th percentile of the KV of sessions that need it for a mean time."""
    return rate * token_s * (1 + _SPREAD / sqrt(rate * seconds))


def check(case: PlanCase, layout: Layout) -> dict[str, Any]:
    """The shared keys of a full-cluster simulation with the online policies."""
    fewest, most = _CHECK_SESSIONS
    count = int(min(max(fewest, case.rate * _CHECK_S), most))
    sessions = retime(case.sessions, case.rate, case.options.seed, count)
    policies = Policies(
        create_named("binding", BINDING),
        create_named("routing", case.routing),
        create_named("ordering", case.ordering),
        create_named("slicing", case.slicing),
    )
    cluster = layout.cluster(case.kv_capacity_tokens, case.model.profile.max_context_tokens or 0, case.kv_store_tokens)
    run = simulate(sessions, cluster, case.model, policies, case.slo, case.options)
    return run.result(case.slo, case.model.profile.kv_bytes_per_token)


def _next_step(case: PlanCase, capacities: Capacities, demand: Demand) -> tuple[int, Choice] | None:
    """The best choice with the smallest number of additional GPUs that makes another replica."""
    step = min(capacities.degrees)
    best = best_layouts(capacities, demand, case.gpus + step, 1)
    return (step, best[0]) if best else None


def even_choice(sessions: Sequence[Session], count: int) -> tuple[Session, ...]:
    """`count` sessions, spread evenly over the trace."""
    if len(sessions) <= count:
        return tuple(sessions)
    return tuple(sessions[index * len(sessions) // count] for index in range(count))


def memory_needs(case: PlanCase, demand: Demand) -> list[tuple[Mapping[int, float], float]]:
    """As `Capacities.memory_needs`, without capacities."""
    memory = {degree: float(capacity or 1 << 40) for degree, capacity in case.kv_capacity_tokens.items()}
    return Capacities((), {}, {}, memory, case.kv_store_tokens).memory_needs(demand)
