import random
from dataclasses import replace

from ampd.perf.presets import load_performance_model
from ampd.policies.registry import create
from ampd.types import PrefillTask, Role, Slo, WorkerView
from tests.ampd.policies import situations

MODEL = load_performance_model("tiny-cpu")
TASK = PrefillTask("t", "s", 0, 1000, 0.0, Slo(1.0, 0.1))


def worker(name: str, used: int, capacity: int = 0, sessions: int = 0, max_context: int = 0) -> WorkerView:
    held = {f"{name}-{i}": 1 for i in range(sessions)}
    return WorkerView(
        name,
        Role.DECODE,
        kv_used_tokens=used,
        kv_capacity_tokens=capacity,
        max_context_tokens=max_context,
        held_tokens=held,
    )


def bind(*workers: WorkerView, seed: int = 0, **shared_tokens: int) -> str:
    binding, rng = create("binding", "least-kv"), random.Random(seed)
    return situations.bind(binding, TASK, workers, MODEL, 0.0, rng, shared_tokens)


def test_the_least_kv_memory_in_use_wins() -> None:
    assert bind(worker("a", 300), worker("b", 200, sessions=9), worker("c", 400)) == "b"


def test_a_worker_that_the_prompt_fits_comes_before_an_emptier_one() -> None:
    assert bind(worker("small", 100, capacity=1099), worker("large", 5000, capacity=6000)) == "large"
    assert bind(worker("small", 100, capacity=1100), worker("large", 5000, capacity=6000)) == "small"
    assert bind(worker("short", 0, max_context=1000), worker("long", 5000, max_context=1001)) == "long"


def test_the_store_counts_where_there_is_one() -> None:
    stored = replace(worker("stored", 900, capacity=1000), store_used_tokens=100, store_capacity_tokens=4000)
    assert bind(worker("a", 300), stored) == "stored"
    assert bind(worker("a", 300), replace(stored, store_used_tokens=3500)) == "a"


def test_where_it_fits_nowhere_the_least_in_use_still_wins() -> None:
    assert bind(worker("a", 900, capacity=1000), worker("b", 800, capacity=1000)) == "b"


def test_ties_go_to_fewer_sessions_then_to_any_by_the_rng() -> None:
    assert bind(worker("a", 5, sessions=2), worker("b", 5, sessions=1)) == "b"
    equals = [worker(name, 5, sessions=1) for name in "abc"]
    assert {bind(*equals, seed=seed) for seed in range(50)} == {"a", "b", "c"}
    assert bind(*equals, seed=7) == bind(*equals, seed=7)


def test_what_a_worker_holds_of_the_prompt_takes_no_more_memory() -> None:
    assert bind(worker("a", 300), worker("b", 700), b=500) == "b"
    assert bind(worker("a", 100), worker("b", 700), b=500) == "a"
    # All hold the prefix: the least memory in use decides again.
    assert bind(worker("a", 300), worker("b", 700), a=500, b=500) == "a"
    # The prompt of 1000 tokens fits where half of it is.
    assert bind(worker("full", 500, capacity=1000), worker("b", 400, capacity=1000)) == "b"
    assert bind(worker("full", 500, capacity=1000), worker("b", 400, capacity=1000), full=500) == "full"
