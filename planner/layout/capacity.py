"""How much load one replica carries: its P95 latency over the session rate, by simulation of that replica alone.

A prefill replica is simulated with ample decode workers, a decode replica with ample prefill workers, and every round
is remote. So the result depends on the replica alone. Its capacity at a level is the largest load whose P95 is at most
level times the target, interpolated linearly between the simulated loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np

from ampd.perf.piecewise import PiecewiseModel
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.policies.routing.always_remote import AlwaysRemote
from ampd.types import Parallelism, Slo
from planner.simulator.cluster import Cluster, ReplicaGroup
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.simulate import simulate
from workloads.retime import retime
from workloads.trace import Session

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
    busy_rate, lifetime_s = full_rate(question), mean_stay(question.sessions, question.model).lifetime_s
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


def _laboratory(question: Question) -> Cluster:
    """One replica of the phase in question, and more than enough replicas of the other phase."""
    best = max(theta.tp for theta in question.model.parallelisms)
    examined = ReplicaGroup(1, Parallelism(question.degree), question.kv_capacity_tokens, question.kv_store_tokens)
    ample = ReplicaGroup(_AMPLE, Parallelism(best), 0)
    prefill, decode = (examined, ample) if question.phase == "prefill" else (ample, examined)
    return Cluster((decode,), (prefill,), question.model.profile.max_context_tokens or 0)


def full_rate(question: Question) -> float:
    """Sessions per second that keep the replica busy all the time."""
    theta, model = Parallelism(question.degree), question.model
    prompts = [pair for session in question.sessions for pair in session.computed_tokens()]
    if question.phase == "prefill":
        busy_s = sum(model.prefill_s(hist, incr, theta) for hist, incr in prompts)
        return len(question.sessions) / busy_s
    rounds = [item for session in question.sessions for item in session.rounds]
    tokens = sum(item.output_tokens for item in rounds)
    context = sum((hist + incr) * item.output_tokens for (hist, incr), item in zip(prompts, rounds, strict=True))
    tokens_per_s = _batch_throughput(question, context / tokens)
    return len(question.sessions) * tokens_per_s / tokens


def _batch_throughput(question: Question, context_tokens: float) -> float:
    """Tokens per second of the largest batch that fits the memory and keeps the ITL target.

    If a single sequence misses half the target, the limit is twice the time of its step.
    """
    theta, model = Parallelism(question.degree), question.model
    limit_s = max(question.slo.itl_s, 2 * model.decode_step_s(1, int(context_tokens), theta))
    most = question.kv_capacity_tokens / context_tokens if question.kv_capacity_tokens else 4096
    batch = 1
    while batch * 2 <= most and model.decode_step_s(batch * 2, int(2 * batch * context_tokens), theta) <= limit_s:
        batch *= 2
    return batch / model.decode_step_s(batch, int(batch * context_tokens), theta)


@dataclass(frozen=True, slots=True)
class Stay:
    """A session in an idle cluster of the largest degree, or the mean of several.

    Attributes:
        lifetime_s: from its first request to its last token, tools included. running_s: the same without tools.
        resident_token_s, running_token_s: tokens of KV times seconds, in the two times. Times the session rate, this
            is the mean KV of all sessions. The prefix that a session shares is no part of it.
    """

    lifetime_s: float
    running_s: float
    resident_token_s: float
    running_token_s: float


def mean_stay(sessions: Sequence[Session], model: PiecewiseModel) -> Stay:
    """The mean of sessions."""
    stays = [_stay(session, model) for session in sessions]
    columns = zip(*(astuple(stay) for stay in stays), strict=True)
    return Stay(*(sum(column) / len(stays) for column in columns))


def _stay(session: Session, model: PiecewiseModel) -> Stay:
    """One session; its KV stays until its next round begins."""
    theta = max(model.parallelisms, key=lambda theta: theta.tp)
    lifetime_s = running_s = resident_token_s = running_token_s = 0.0
    rounds = zip(session.computed_tokens(), session.shared_tokens(), session.rounds, strict=True)
    for index, ((hist, incr), shared, item) in enumerate(rounds):
        context = hist + incr
        own_tokens = context - shared + item.output_tokens
        seconds = model.prefill_s(hist, incr, theta)
        seconds += item.output_tokens * model.decode_step_s(1, context, theta)
        running_s += seconds
        running_token_s += seconds * own_tokens
        if index + 1 < len(session.rounds):
            seconds += session.rounds[index + 1].tool_s
        lifetime_s += seconds
        resident_token_s += seconds * own_tokens
    return Stay(lifetime_s, running_s, resident_token_s, running_token_s)
