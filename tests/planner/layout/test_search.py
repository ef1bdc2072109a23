"""The search for a layout, with load curves that are known already: what it takes from them, and the order it gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.layout.cache import CurveCache, digest_sessions, key_of
from planner.layout.capacity import LEVELS, LoadCurve, Phase, Question
from planner.layout.search import demand_of, make_plan, simulated_capacities

from .lab import CASE, MODEL, SLO


def rate_of(phase: Phase, degree: int) -> float:
    """The load that a replica carries at every level."""
    return degree * (3.0 if phase == "prefill" else 1.0)


@pytest.fixture
def cache(tmp_path: Path) -> CurveCache:
    known, digest = CurveCache(tmp_path), digest_sessions(CASE.sessions)
    for degree, capacity in CASE.kv_capacity_tokens.items():
        for phase in ("prefill", "decode"):
            question = Question(
                phase, degree, CASE.sessions, MODEL, CASE.ordering, CASE.slicing, SLO, CASE.options, capacity
            )
            known.put(key_of(question, digest), LoadCurve((rate_of(phase, degree),), (0.0,)))
    return known


def test_known_curves_are_not_simulated_again(cache: CurveCache) -> None:
    found = simulated_capacities(CASE, cache, 1)
    for phase, table in (("prefill", found.prefill), ("decode", found.decode)):
        assert table == {degree: [rate_of(phase, degree)] * len(LEVELS) for degree in (1, 2)}
    assert found.kv_tokens == CASE.kv_capacity_tokens


@pytest.mark.slow
def test_a_plan_has_checked_layouts_within_the_gpus_and_the_next_step(cache: CurveCache) -> None:
    plan = make_plan(CASE, 3, cache, 1)
    assert 1 <= len(plan.layouts) <= 3
    assert len({entry.choice.layout for entry in plan.layouts}) == len(plan.layouts)
    for entry in plan.layouts:
        assert entry.choice.layout.gpus <= CASE.gpus
        assert entry.simulated["rounds"] > 0
    attained = [round(entry.attainment, 3) for entry in plan.layouts]
    assert attained == sorted(attained, reverse=True)
    assert plan.next_step is not None
    gpus, choice = plan.next_step
    assert gpus == 1
    assert choice.headroom >= max(entry.choice.headroom for entry in plan.layouts)


def test_without_room_for_two_replicas_there_is_no_layout(cache: CurveCache) -> None:
    assert make_plan(replace(CASE, gpus=1), 3, cache, 1).layouts == []


def test_memory_is_planned_for_more_sessions_than_the_mean_and_less_so_where_there_are_many() -> None:
    few, many = (demand_of(replace(CASE, rate=rate)) for rate in (0.1, 1000.0))
    assert few.resident_kv_tokens / 0.1 > many.resident_kv_tokens / 1000.0
