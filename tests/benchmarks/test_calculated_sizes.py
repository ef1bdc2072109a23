"""What whole graphs need, from what their parts cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.calculated_sizes import Costs, Work, costs_of, needs, tables

COSTS = Costs(Work(4000, 162), Work(4500, 59), Work(1300, 45), Work(500, 30), 0, 44, 46, 2, 99)


def test_the_needs_of_a_graph() -> None:
    """By hand: 60 sessions have a round per second with 200 tokens. Three workers of four decode."""
    graph = needs(4, 60, COSTS)
    publications_per_s = 1.78 * 1 + 2.9 * 3
    assert graph.following == pytest.approx(publications_per_s * 99e-6)
    assert graph.frontends == pytest.approx(1.3e-3 + 200 * 45e-6)
    assert graph.relays == pytest.approx(0.5e-3 + 200 * 30e-6)
    assert graph.redis == pytest.approx(44e-6 + publications_per_s * 46e-6)
    assert graph.redis_per_coordinator == pytest.approx(publications_per_s * 2e-6)
    assert (graph.coordinators, graph.grouped_coordinators) == (1, 1)


def test_a_coordinator_follows_all_workers_whatever_its_share_of_the_rounds_is() -> None:
    assert needs(64, 10_000, COSTS).coordinators == 7
    assert needs(64, 10_000, COSTS).grouped_coordinators == 3
    assert needs(64, 10_000, replace(COSTS, applied_us=1200)).coordinators == 13, "half of each core follows"
    assert needs(64, 10_000, replace(COSTS, applied_us=2400)).coordinators is None


def test_decisions_are_work_of_the_coordinators() -> None:
    slow = needs(64, 10_000, replace(COSTS, decision_us=12_000))
    assert slow.deciding == pytest.approx(2.0)
    assert slow.coordinators == 9


def test_the_coordinators_time_is_shared_by_what_they_do() -> None:
    """Of 7 coordinators: 33,333 tokens/s, 167 rounds/s, and each follows the 48 workers that decode."""
    shares = needs(64, 10_000, COSTS).shares
    times = {"tokens": 33_333 * 162e-6, "rounds": 166.7 * 4e-3, "decisions": 0.0}
    times["following"] = 7 * (1.78 * 166.7 + 2.9 * 48) * 99e-6
    assert shares == pytest.approx({name: time_s / sum(times.values()) for name, time_s in times.items()}, rel=1e-3)
    assert not needs(64, 10_000, replace(COSTS, applied_us=2400)).shares


def test_the_costs_are_those_of_the_size() -> None:
    measured, tokens, decisions = documents()
    costs = costs_of(64, 10_000, measured, tokens, decisions)
    assert (costs.applied_us, costs.decision_us) == (64.0, 16.0)
    assert (costs.coordinator.round_us, costs.grouped_coordinator.token_us) == (3.0, 4.0)
    with pytest.raises(KeyError, match="workers 32"):
        costs_of(32, 10_000, measured, tokens, decisions)
    assert len(list(tables(measured, tokens, decisions))) == 5


def documents() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Outputs of the three benchmarks, with a figure that names its size."""
    now = {"commit": "c", "date": "d", "load": 1.0}
    call = {"redis_us": 1.0, "caller_us": 1.0}
    sizes = [
        {"workers": workers, "sessions": sessions, "applied_us": float(workers), "to_one_us": 0.0, "view_bytes": 1}
        | {"ping": call, "route": call, "publish": call, "snapshot_ms": 1.0, "redis_mb": 1.0}
        for workers, sessions in ((64, 10_000), (256, 25_000), (1000, 100_000))
    ]
    names = ("coordinator-with", "coordinator-with-4", "frontend-with", "status_relay-status")
    figures = {name: {"round_us": 3.0, "token_us": 4.0} for name in names}
    rows = [
        {"policy": "predictive", "workers": count, "queue": 8, "p50_us": float(count), "p99_us": 1.0}
        for count in (16, 64, 250)
    ]
    return {"sizes": sizes, **now}, {"concurrency_32": figures, **now}, {"results": rows, **now}
