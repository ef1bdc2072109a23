"""What holds for every routing policy, whatever the cluster looks like."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.registry import ROUTING
from ampd.telemetry.metrics.exposition import LabelValues
from ampd.types import Parallelism, Role, Route, Window, WorkerView
from tests.ampd.policies.routing_lab import decode, prefill, queue_of, round_of, route

MODEL = load_performance_model("qwen3-32b-h20")
TP4 = Parallelism(4)
POLICIES = (*ROUTING.names(), "always-remote(choice=random)", "threshold(tokens=64)")

windows = st.builds(Window, st.floats(0, 3), st.integers(0, 9))


@st.composite
def views(draw: st.DrawFn, role: Role, name: str) -> WorkerView:
    batch = draw(st.integers(0, 64))
    return WorkerView(
        name,
        role,
        TP4,
        queue_of(*draw(st.lists(st.integers(1, 20_000), max_size=5))),
        draw(windows),
        draw(windows),
        batch,
        batch * draw(st.integers(1, 30_000)),
        max_context_tokens=draw(st.sampled_from([0, 4000, 40_000])),
        held_tokens={"s": draw(st.integers(0, 40_000))},
    )


@st.composite
def clusters(draw: st.DrawFn) -> tuple[WorkerView, tuple[WorkerView, ...]]:
    """The session's decode worker, which may have become a prefill worker, and all prefill workers."""
    own = draw(views(draw(st.sampled_from(list(Role))), "d"))
    others = [draw(views(Role.PREFILL, f"p{number}")) for number in range(draw(st.integers(0, 5)))]
    return own, tuple([*others, own] if own.role is Role.PREFILL else others)


@pytest.mark.parametrize("policy", POLICIES)
@given(clusters(), st.integers(0, 40_000), st.integers(1, 20_000), st.integers(0, 99))
def test_a_round_goes_to_a_worker_that_is_there_and_takes_its_prompt(
    policy: str, cluster: tuple[WorkerView, tuple[WorkerView, ...]], hist: int, incr: int, seed: int
) -> None:
    own, workers = cluster
    task = round_of(hist, incr)
    decision = route(policy, task, own, *workers, seed=seed, model=MODEL)
    assert (decision.route is Route.LOCAL) == (decision.worker_id == own.worker_id)
    if decision.route is Route.REMOTE:
        (chosen,) = [worker for worker in workers if worker.worker_id == decision.worker_id]
        assert not 0 < chosen.max_context_tokens < task.context_tokens
    assert decision == route(policy, task, own, *workers, seed=seed, model=MODEL)
    assert LabelValues()(decision.reason) == decision.reason, "a label of a metric: plain words, no numbers"


@pytest.mark.parametrize(
    "policy",
    ["always-remote", "always-remote(choice=random)", "threshold", "first-remote", "arrow", "deflection", "predictive"],
)
def test_equal_workers_get_equal_shares(policy: str) -> None:
    busy = decode(90_000, batch=4)
    chosen = Counter(
        route(policy, round_of(0, 3000), busy, *(prefill(name, 50) for name in "abc"), seed=seed).worker_id
        for seed in range(900)
    )
    assert chosen.keys() == set("abc")
    assert min(chosen.values()) > 240


@pytest.mark.parametrize("policy", ["always-remote", "always-remote(choice=random)", "ampd", "arrow", "predictive"])
def test_a_decode_worker_that_became_a_prefill_worker_prefills_its_own_sessions_locally(policy: str) -> None:
    own = replace(decode(), role=Role.PREFILL, itl=Window(9.0, 1))
    decision = route(policy, round_of(5000, 100), own, own)
    assert (decision.route, decision.worker_id) == (Route.LOCAL, "d")
    assert all(estimate.transfer_s == 0 for estimate in decision.estimates)
