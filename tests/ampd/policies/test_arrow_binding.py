"""Arrow's decode dispatch, once per session."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ampd.policies.registry import create_named
from ampd.types import PrefillTask, Role, Window, WorkerView
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PLAIN, SLO, queue_of, round_of

TASK = round_of(0, 1000)


def worker(
    name: str, running: int, *queue: int, itl_s: float = 0.0, batch: int = 1, capacity: int = 0, used: int = 0
) -> WorkerView:
    return WorkerView(
        name,
        Role.DECODE,
        queue=queue_of(*queue),
        itl=Window(itl_s, bool(itl_s)),
        decode_batch=batch,
        decode_context_tokens=running,
        kv_capacity_tokens=capacity,
        kv_used_tokens=used,
    )


def bind(*workers: WorkerView, policy: str = "arrow", seed: int = 0) -> str:
    return situations.bind(create_named("binding", policy), TASK, workers, PLAIN, 0.0, random.Random(seed))


def test_the_fewest_running_tokens_win() -> None:
    assert bind(worker("a", 500), worker("b", 400, itl_s=0.04, batch=9), worker("c", 600)) == "b"


def test_a_worker_whose_itl_is_late_is_passed_over() -> None:
    assert bind(worker("late", 0, itl_s=0.0401), worker("b", 400)) == "b"


def test_a_worker_over_its_maximum_is_passed_over() -> None:
    # Its KV memory, and the step of the batch with this session in it (40 ms at 35 sequences).
    assert bind(worker("few", 10, 7), worker("more", 2001, capacity=3000)) == "few"
    assert bind(worker("few", 10, 7), worker("more", 500, batch=35)) == "few"
    assert bind(worker("few", 10, 7), worker("more", 500, batch=34)) == "more"


def test_one_that_still_prefills_comes_second_and_when_all_are_late_the_lesser() -> None:
    assert bind(worker("p2d", 10, 7), worker("d", 900)) == "d"
    assert bind(worker("p2d", 10, 7), worker("d", 5, itl_s=0.05)) == "p2d"
    assert bind(worker("p2d", 10, 7, itl_s=0.05), worker("d", 5, itl_s=0.05)) == "d"


def test_a_prefill_of_its_own_session_makes_no_worker_second() -> None:
    own = (PrefillTask("q", "mine", 500, 7, 0.0, SLO),)
    busy = replace(worker("busy", 10), queue=own, held_tokens={"mine": 500})
    assert bind(busy, worker("d", 900)) == "busy"
    assert bind(replace(busy, held_tokens={"mine": 400}), worker("d", 900)) == "d"


def test_one_that_the_prompt_fits_comes_before_all_others() -> None:
    assert bind(worker("full", 0, capacity=5000, used=4001), worker("roomy", 3000, itl_s=0.05)) == "roomy"
    assert bind(worker("full", 0, capacity=5000, used=4000), worker("roomy", 3000)) == "full"


def test_equals_share() -> None:
    assert {bind(*(worker(name, 5) for name in "abc"), seed=seed) for seed in range(60)} == {"a", "b", "c"}


loads = st.lists(st.tuples(st.integers(0, 90_000), st.integers(0, 60), st.floats(0.001, 0.1)), min_size=1, max_size=6)


@given(loads)
def test_a_late_worker_is_only_bound_when_all_are_late_or_over_their_maximum(
    loads: list[tuple[int, int, float]],
) -> None:
    workers = [worker(str(i), running, itl_s=itl, batch=batch) for i, (running, batch, itl) in enumerate(loads)]
    chosen = workers[int(bind(*workers))]

    def has_room(candidate: WorkerView) -> bool:
        return (
            candidate.itl.mean_s <= SLO.itl_s
            and PLAIN.decode_step_s(candidate.decode_batch + 1, 0, candidate.parallelism) <= SLO.itl_s
        )

    assert has_room(chosen) or not any(has_room(candidate) for candidate in workers)
