"""The decisions that are measured: each in the cluster that it is about."""

import random
import time
from collections import Counter

import pytest

from ampd.serving import placement
from ampd.serving.moves import MoveSituation, due_move
from ampd.types import Role
from benchmarks.decision_cases import BIND, MIXED, PLAN, Case, Cluster, cases, decision, make_task
from benchmarks.decision_time import measure


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_every_decision_names_a_worker_that_takes_the_prefill(case: Case) -> None:
    row = measure(case, count=4, queue=4, decisions=3, seed=1, clock=time.perf_counter_ns)
    assert row["policy"] == case.label
    assert sum(row["reasons"].values()) == 3
    assert row["p50_us"] > 0


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        (BIND, {Role.DECODE: 7}),
        (MIXED, {Role.MIXED: 7}),
        (PLAN, {Role.PREFILL: 4, Role.DECODE: 3}),
        ("predictive", {Role.PREFILL: 7, Role.DECODE: 1}),
    ],
)
def test_the_cluster_has_the_workers_that_are_counted(name: str, roles: dict[Role, int]) -> None:
    cluster = Cluster(random.Random(1), Case(name, name), 7, 8)
    assert Counter(view.role for view in cluster.view.workers()) == roles
    assert cluster.decode().role.owns_sessions


def test_a_plan_tries_new_owners_because_the_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[MoveSituation] = []

    def noted(situation: MoveSituation) -> object:
        asked.append(situation)
        return due_move(situation)

    monkeypatch.setattr(placement, "due_move", noted)
    rng = random.Random(1)
    case = Case(PLAN, PLAN)
    decide, cluster = decision(case, rng), Cluster(rng, case, 8, 2)
    reasons = [decide(cluster, make_task(rng))[1] for _ in range(20)]
    assert len(asked) == 20
    assert all(len(situation.others) == 3 for situation in asked)
    assert "memory" in reasons
