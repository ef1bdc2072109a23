"""The search for a layout, with load curves that are known already: what it takes from them, and the order it gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paper_plan.curve_cache import CurveCache, digest_sessions, key_of
from benchmarks.paper_plan.load_curves import LEVELS, LoadCurve, Phase, Question
from benchmarks.paper_plan.search import checked_layouts, prefix_tokens, simulated_capacities
from tests.planner.layout.lab import CASE, MODEL, SLO
from workloads.trace import Round, Session, SharedPrefix


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
    assert found.prefill == {degree: [rate_of("prefill", degree)] * len(LEVELS) for degree in (1, 2)}
    assert found.decode == {degree: [rate_of("decode", degree)] * len(LEVELS) for degree in (1, 2)}
    assert found.kv_tokens == CASE.kv_capacity_tokens


@pytest.mark.slow
def test_layouts_are_checked_and_within_the_gpus_and_the_best_is_first(cache: CurveCache) -> None:
    checked = checked_layouts(CASE, 3, cache, 1)
    assert 1 <= len(checked) <= 3
    assert len({entry.choice.layout for entry in checked}) == len(checked)
    for entry in checked:
        assert entry.choice.layout.gpus <= CASE.gpus
        assert entry.simulated["rounds"] > 0
    attained = [round(entry.attainment, 3) for entry in checked]
    assert attained == sorted(attained, reverse=True)


def test_without_room_for_two_replicas_there_is_no_layout(cache: CurveCache) -> None:
    assert checked_layouts(replace(CASE, gpus=1), 3, cache, 1) == []


def test_each_prefix_counts_once() -> None:
    def sharing(tokens: int, name: str) -> Session:
        prefix = SharedPrefix(id=name, tokens=tokens)
        return Session(
            session_id="s", arrival_s=0.0, rounds=(Round(incr_tokens=100, output_tokens=1),), shared_prefix=prefix
        )

    assert prefix_tokens([sharing(80, "p"), sharing(90, "p"), sharing(10, "q"), *CASE.sessions]) == 100
    assert prefix_tokens([]) == 0
