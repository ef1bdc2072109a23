import random

import pytest

from ampd.perf.presets import load_performance_model
from ampd.policies.registry import create
from ampd.types import Parallelism, PrefillTask, Role, Route, RouteDecision, Slo, WorkerView
from tests.ampd.policies import situations

MODEL = load_performance_model("qwen3-32b-h20")
SLO = Slo(ttft_s=1.0, itl_s=0.04)
TP4 = Parallelism(4)
DECODE = WorkerView("d", Role.DECODE, TP4)


def worker(name: str, lane: str, *queue: int, context_tokens: int = 0) -> WorkerView:
    tasks = tuple(PrefillTask(f"{name}{index}", "x", 0, tokens, 0.0, SLO) for index, tokens in enumerate(queue))
    return WorkerView(name, Role.PREFILL, TP4, tasks, max_context_tokens=context_tokens, label=lane)


def route(incr_tokens: int, *workers: WorkerView, boundary_tokens: int = 256) -> RouteDecision:
    task = PrefillTask("t", "s", 3000, incr_tokens, 0.0, SLO)
    policy = create("routing", "laps", boundary_tokens=boundary_tokens)
    return situations.route(policy, task, DECODE, workers, MODEL, 0.0, random.Random(0))


LANES = (
    worker("s1", "short", 100, 100),
    worker("s2", "short", 100),
    worker("l1", "long", 9000),
    worker("l2", "long", 9000, 9000),
)


@pytest.mark.parametrize(("tokens", "lane", "chosen"), [(1, "short", "s2"), (256, "short", "s2"), (257, "long", "l1")])
def test_a_round_goes_to_the_least_queued_work_of_the_lane_for_its_new_tokens(
    tokens: int, lane: str, chosen: str
) -> None:
    decision = route(tokens, *LANES)
    assert (decision.route, decision.worker_id, decision.reason) == (Route.REMOTE, chosen, lane)
    assert [estimate.worker_id for estimate in decision.estimates] == [
        lane_worker.worker_id for lane_worker in LANES if lane_worker.label == lane
    ]


def test_the_boundary_is_a_parameter() -> None:
    assert route(300, *LANES, boundary_tokens=300).reason == "short"
    assert route(301, *LANES, boundary_tokens=300).reason == "long"


def test_a_lane_without_workers_leaves_all_of_them() -> None:
    decision = route(100, *LANES[2:], worker("none", ""))
    assert (decision.worker_id, decision.reason) == ("none", "no-lane")
    assert len(decision.estimates) == 3


def test_a_lane_whose_workers_cannot_take_the_prompt_leaves_all_of_them() -> None:
    decision = route(100, worker("s", "short", context_tokens=3100), *LANES[2:])
    assert (decision.worker_id, decision.reason) == ("l1", "no-lane")
    assert route(100, worker("s", "short", context_tokens=3101), *LANES[2:]).reason == "short"
