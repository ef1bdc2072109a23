"""What a session costs on a replica of each degree."""

from dataclasses import replace

from ampd.types import Parallelism, Slo
from planner.layout.fluid import costs_of

from .lab import CASE


def test_a_degree_that_misses_a_target_alone_gets_none_of_that_phase() -> None:
    costs = costs_of(CASE)
    assert set(costs.prefill_s) == set(costs.decode_s) == set(CASE.degrees)
    step_s = {n: CASE.model.decode_step_s(1, 80, Parallelism(n)) for n in CASE.degrees}
    between = replace(CASE, slo=Slo(10.0, (step_s[1] + step_s[2]) / 2))
    assert set(costs_of(between).decode_s) == {2}
    assert set(costs_of(replace(CASE, slo=Slo(10.0, 1e-6))).decode_s) == set(CASE.degrees)
