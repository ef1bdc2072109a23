"""How much KV the sessions of a case need at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import sqrt

from ampd.perf.piecewise import PiecewiseModel
from planner.layout.case import PlanCase
from workloads.trace import Session

_SPREAD = 1.645
"""Memory is planned for the 95th percentile of the resident sessions, a Poisson variable."""
_UNLIMITED_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Demand:
    """The load that the layout must carry.

    Attributes:
        rate: sessions per second.
        resident_kv_tokens: KV of all sessions that are in the cluster at the same time.
        running_kv_tokens: KV of the sessions whose rounds run.
    """

    rate: float
    resident_kv_tokens: float = 0.0
    running_kv_tokens: float = 0.0


def demand_of(case: PlanCase) -> Demand:
    """The rate, and the 95th percentiles of the resident and of the running KV for sessions of mean size."""
    stay = mean_stay(case.sessions, case.model)
    return Demand(
        case.rate,
        _kv_tokens(case.rate, stay.lifetime_s, stay.resident_token_s),
        _kv_tokens(case.rate, stay.running_s, stay.running_token_s),
    )


def _kv_tokens(rate: float, seconds: float, token_s: float) -> float:
    """The 95th percentile of the KV that sessions need at the same time, from how long one needs it on average."""
    return rate * token_s * (1 + _SPREAD / sqrt(rate * seconds))


def memory_needs(
    kv_tokens: Mapping[int, float], store_tokens: Mapping[int, float], demand: Demand
) -> list[tuple[Mapping[int, float], float]]:
    """(tokens of a replica by degree, tokens that the decode replicas need together), for each kind of memory.

    With a store, KV memory holds the running rounds and host memory the resident sessions. Without one, KV memory
    holds them all.

    Args:
        kv_tokens: degree -> KV memory of a replica. 0: unlimited.
        store_tokens: degree -> host memory of a replica's KV store; empty: replicas have no stores.
    """
    memory = {degree: float(tokens or _UNLIMITED_TOKENS) for degree, tokens in kv_tokens.items()}
    if not store_tokens:
        return [(memory, demand.resident_kv_tokens)]
    return [(memory, demand.running_kv_tokens), (store_tokens, demand.resident_kv_tokens)]


@dataclass(frozen=True, slots=True)
class Stay:
    """A session in an idle cluster of the largest degree, or the mean of several.

    Attributes:
        lifetime_s: from its first request to its last token, tools included. running_s: the same without tools.
        resident_token_s, running_token_s: the session's tokens of KV times the seconds that they stay, for the two
            times above. Multiplied by the session rate, they give the mean KV of all sessions in the cluster. A prefix
            that the session shares with others does not count.
    """

    lifetime_s: float
    running_s: float
    resident_token_s: float
    running_token_s: float


def mean_stay(sessions: Sequence[Session], model: PiecewiseModel) -> Stay:
    stays = [_stay(session, model) for session in sessions]
    columns = zip(*(astuple(stay) for stay in stays), strict=True)
    return Stay(*(sum(column) / len(stays) for column in columns))


def _stay(session: Session, model: PiecewiseModel) -> Stay:
    """The stay of one session. Its KV stays until its next round begins."""
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
