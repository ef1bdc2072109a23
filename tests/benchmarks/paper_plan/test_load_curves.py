"""Load curves: capacities grow with the level and the degree, and answer what the simulator would."""

import numpy as np
import pytest

from ampd.policies.registry import create
from ampd.types import Parallelism
from benchmarks.paper_plan.load_curves import LoadCurve, Phase, load_curve
from planner.simulator.options import Cluster, Policies, ReplicaGroup
from planner.simulator.simulate import simulate
from tests.planner.layout.lab import MODEL, SESSIONS, SLO
from workloads.trace import retime

from .lab import question


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
