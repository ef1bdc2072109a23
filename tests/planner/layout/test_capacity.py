"""Load curves: capacities grow with the level and the degree, and answer what the simulator would."""

from dataclasses import replace

import numpy as np
import pytest

from ampd.perf.presets import analytic_model
from ampd.policies.registry import create
from ampd.types import Parallelism, Slo
from planner.layout.cache import CurveCache, digest_sessions, key_of
from planner.layout.capacity import LoadCurve, Phase, Question, load_curve, mean_lifetime_s, mean_resident_kv_tokens
from planner.simulator.cluster import Cluster, ReplicaGroup
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.simulate import simulate
from workloads.generate import Lengths, generate
from workloads.retime import retime

MODEL = analytic_model("llama-3.1-8b", "h20")
SLO = Slo(0.3, 0.02)
SESSIONS = tuple(generate("toolbench", 100, 1.0, 0, Lengths.PER_SESSION))


def question(phase: Phase, degree: int) -> Question:
    capacity = MODEL.kv_capacity_tokens(Parallelism(degree)) or 0
    return Question(phase, degree, SESSIONS, MODEL, "fcfs", "whole", SLO, SimulationOptions(), capacity)


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert mean_lifetime_s(SESSIONS, MODEL) - mean_lifetime_s(quick, MODEL) == pytest.approx(tools_s)
    assert mean_resident_kv_tokens(SESSIONS, MODEL) > mean_resident_kv_tokens(quick, MODEL)


def test_the_key_of_a_curve_names_everything_that_it_depends_on() -> None:
    each = question("prefill", 1)
    digest = digest_sessions(SESSIONS)
    others = [
        replace(each, degree=2),
        replace(each, phase="decode"),
        replace(each, slo=Slo(0.31, 0.02)),
        replace(each, ordering="ampd"),
        replace(each, options=SimulationOptions(seed=1)),
        replace(each, kv_capacity_tokens=1),
        replace(each, model=analytic_model("llama-3.1-8b", "h100")),
    ]
    keys = {key_of(other, digest) for other in others}
    assert len(keys) == len(others)
    assert key_of(each, digest) not in keys
    assert key_of(each, digest_sessions(SESSIONS[:-1])) != key_of(each, digest)
    renamed = tuple(session.model_copy(update={"session_id": "x" + session.session_id}) for session in SESSIONS)
    assert digest_sessions(renamed) == digest


def test_a_cache_that_cannot_be_used_is_no_error(tmp_path: pytest.TempPathFactory) -> None:
    from pathlib import Path

    blocked = Path(str(tmp_path)) / "file"
    blocked.write_text("")
    for cache in (CurveCache(None), CurveCache(blocked)):
        cache.put("k", LoadCurve((1.0,), (1.0,)))
        assert cache.get("k") is None
