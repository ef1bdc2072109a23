"""Load curves: capacities grow with the level and the degree, and answer what the simulator would."""

import numpy as np
import pytest

from ampd.policies.registry import create
from ampd.types import Parallelism
from planner.layout.capacity import LoadCurve, Phase, load_curve, mean_stay
from planner.simulator.cluster import Cluster, ReplicaGroup
from planner.simulator.options import Policies
from planner.simulator.simulate import simulate
from workloads.retime import retime
from workloads.trace import Session, SharedPrefix

from .lab import MODEL, SESSIONS, SLO, question


@pytest.mark.long
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_capacities_grow_with_the_level_and_the_degree(phase: Phase) -> None:
    curves = {degree: load_curve(question(phase, degree)) for degree in (1, 4)}
    for curve in curves.values():
        assert list(curve.levels) == sorted(curve.levels)
        assert list(curve.rates) == sorted(curve.rates)
        capacities = [curve.capacity(level) for level in (0.01, 0.3, 1.0, 3.0)]
        assert capacities == sorted(capacities)
        assert capacities[0] == 0
    assert curves[4].capacity(1.0) > 1.5 * curves[1].capacity(1.0)


@pytest.mark.long
def test_a_prefill_replica_at_its_capacity_is_at_its_level() -> None:
    asked = question("prefill", 2)
    rate = load_curve(asked).capacity(1.0)
    policies = Policies(create("binding", "least-kv"), create("routing", "always-remote"), create("ordering", "fcfs"))
    cluster = Cluster((ReplicaGroup(16, Parallelism(8), 0),), (ReplicaGroup(1, Parallelism(2), 0),))
    p95 = [
        np.percentile(
            [
                record.ttft_s
                for record in simulate(retime(SESSIONS, factor * rate, 0, 500), cluster, MODEL, policies, SLO).rounds
                if record.ttft_s is not None
            ],
            95,
        )
        for factor in (0.6, 1.0, 1.5)
    ]
    assert p95[0] < 0.85 * SLO.ttft_s
    assert p95[1] == pytest.approx(SLO.ttft_s, rel=0.4)
    assert p95[2] > 1.2 * SLO.ttft_s


def test_between_simulated_loads_the_curve_is_a_line() -> None:
    curve = LoadCurve((1.0, 2.0, 3.0), (0.5, 0.5, 1.5))
    assert curve.capacity(0.4) == 0
    assert curve.capacity(0.5) == 2.0
    assert curve.capacity(1.0) == pytest.approx(2.5)
    assert curve.capacity(9.0) == 3.0


def test_residence_counts_tools_and_grows_with_the_context() -> None:
    quick = tuple(
        session.model_copy(update={"rounds": tuple(item.model_copy(update={"tool_s": 0.0}) for item in session.rounds)})
        for session in SESSIONS
    )
    tools_s = sum(item.tool_s for session in SESSIONS for item in session.rounds) / len(SESSIONS)
    stay, quick_stay = mean_stay(SESSIONS, MODEL), mean_stay(quick, MODEL)
    assert stay.lifetime_s - quick_stay.lifetime_s == pytest.approx(tools_s)
    assert stay.resident_token_s > quick_stay.resident_token_s
    assert (stay.running_s, stay.running_token_s) == (quick_stay.running_s, quick_stay.running_token_s)
    assert quick_stay.resident_token_s == pytest.approx(quick_stay.running_token_s)


def behind(session: Session, tokens: int, *, shared: bool) -> Session:
    """A session after a system prompt."""
    first, *later = session.rounds
    rounds = (first.model_copy(update={"incr_tokens": tokens + first.incr_tokens}), *later)
    prefix = SharedPrefix(id="system", tokens=tokens) if shared else None
    return session.model_copy(update={"rounds": rounds, "shared_prefix": prefix})


def test_a_shared_prefix_is_neither_work_nor_memory_of_a_session() -> None:
    whole, shared = (tuple(behind(session, 5000, shared=each) for session in SESSIONS) for each in (False, True))
    stay, shared_stay = mean_stay(whole, MODEL), mean_stay(shared, MODEL)
    # 5000 tokens a session for all of its time, and the time of their prefill.
    saved = stay.resident_token_s - shared_stay.resident_token_s
    assert saved > 5000 * shared_stay.lifetime_s
    theta = max(MODEL.parallelisms, key=lambda theta: theta.tp)
    assert stay.running_s - shared_stay.running_s == pytest.approx(
        sum(
            MODEL.prefill_s(0, 5000 + item.rounds[0].incr_tokens, theta)
            - MODEL.prefill_s(5000, item.rounds[0].incr_tokens, theta)
            for item in SESSIONS
        )
        / len(SESSIONS)
    )
