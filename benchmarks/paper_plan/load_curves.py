"""How much load one replica carries: its P95 latency over the session rate, by simulation of that replica alone.

A prefill replica is simulated with ample decode workers, a decode replica with ample prefill workers, and every round
is remote. So the result depends on the replica alone. Its capacity at a level is the largest load whose P95 is at most
level times the target, interpolated linearly between the simulated loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ampd.perf.piecewise import PiecewiseModel
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.policies.routing.always_remote import AlwaysRemote
from ampd.types import Parallelism, Slo
from planner.layout.fluid import decode_rate, mean_stay, prefill_rate
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from planner.simulator.simulate import simulate
from workloads.trace import Session, retime

Phase = Literal["prefill", "decode"]

LEVELS = tuple(round(0.1 * 1.15**step, 4) for step in range(31))
"""P95 over target: from a tenth of the target to 6.6 times it, 15 % apart."""

_UTILISATIONS = (0.15, 0.35, 0.55, 0.7, 0.8, 0.9, 1.0, 1.15)
"""Simulated loads, as shares of the load that keeps the replica busy all the time."""

_SESSIONS = (250, 700)
"""Fewest and most sessions of one simulation. Within them, enough for the load to settle."""
_LIFETIMES = 3.0
_AMPLE = 16


@dataclass(frozen=True, slots=True)
class Question:
    """One curve to simulate: a phase on one degree."""

    phase: Phase
    degree: int
    sessions: tuple[Session, ...]
    model: PiecewiseModel
    ordering: str
    slicing: str
    slo: Slo
    options: SimulationOptions
    kv_capacity_tokens: int
    kv_store_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """P95 latency over its target, by session rate; both ascending."""

    rates: tuple[float, ...]
    levels: tuple[float, ...]

    def capacity(self, level: float) -> float:
        """The largest rate with a P95 at this level or below; 0 if even an idle replica is slower."""
        if level < self.levels[0]:
            return 0.0
        return float(np.interp(level, self.levels, self.rates))


def load_curve(question: Question) -> LoadCurve:
    """Simulate one replica at growing load."""
    busy_rate, lifetime_s = _busy_rate(question), mean_stay(question.sessions, question.model).lifetime_s
    rates, levels = [], []
    worst = 0.0
    for utilisation in _UTILISATIONS:
        rate = utilisation * busy_rate
        # A P95 that falls while the load grows is noise, because the sample is finite.
        worst = max(worst, _level(question, rate, lifetime_s))
        rates.append(rate)
        levels.append(worst)
        if worst > LEVELS[-1]:
            break
    return LoadCurve(tuple(rates), tuple(levels))


def _level(question: Question, rate: float, lifetime_s: float) -> float:
    fewest, most = _SESSIONS
    count = int(min(max(fewest, _LIFETIMES * rate * lifetime_s), most))
    sessions = retime(question.sessions, rate, question.options.seed, count)
    policies = Policies(
        create_named("binding", defaults.BINDING),
        create_named("routing", AlwaysRemote.policy_name),
        create_named("ordering", question.ordering),
        create_named("slicing", question.slicing),
    )
    run = simulate(sessions, _laboratory(question), question.model, policies, question.slo, question.options)
    if question.phase == "prefill":
        values, target_s = [record.ttft_s for record in run.rounds if record.ttft_s is not None], question.slo.ttft_s
    else:
        values, target_s = [record.itl_s for record in run.rounds if record.itl_s is not None], question.slo.itl_s
    # Rounds of a single token have no gaps between tokens.
    return float(np.percentile(values, 95)) / target_s if values else 0.0


def _busy_rate(question: Question) -> float:
    """Sessions per second that keep the replica busy all the time."""
    theta = Parallelism(question.degree)
    if question.phase == "prefill":
        return prefill_rate(question.sessions, question.model, theta)
    return decode_rate(question.sessions, question.model, theta, question.slo.itl_s, question.kv_capacity_tokens)


def _laboratory(question: Question) -> Cluster:
    """One replica of the phase in question, and more than enough replicas of the other phase."""
    best = max(theta.tp for theta in question.model.parallelisms)
    examined = ReplicaGroup(1, Parallelism(question.degree), question.kv_capacity_tokens, question.kv_store_tokens)
    ample = ReplicaGroup(_AMPLE, Parallelism(best), 0)
    prefill, decode = (examined, ample) if question.phase == "prefill" else (ample, examined)
    return Cluster((decode,), (prefill,), question.model.profile.max_context_tokens or 0)
