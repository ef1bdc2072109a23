"""Which sets of roles a look ahead tries."""

from collections import Counter

from ampd.perf.presets import analytic_model
from ampd.types import Parallelism, Role, WorkerView
from planner.look_ahead.comparison import candidate_roles, in_words

MODEL = analytic_model("llama-3.1-8b", "h20")


def cluster(*roles: Role, tp: int = 1) -> list[WorkerView]:
    return [WorkerView(f"w{number}", role, Parallelism(tp)) for number, role in enumerate(roles)]


def words(workers: list[WorkerView]) -> list[str]:
    return [in_words(roles) for roles in candidate_roles(workers, MODEL)]


def test_the_present_roles_come_first_and_co_location_is_always_tried() -> None:
    assert words(cluster(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)) == [
        "2 prefill, 2 decode",
        "3 prefill, 1 decode",
        "1 prefill, 3 decode",
        "4 decode",
    ]


def test_mixed_workers_may_become_prefill_workers() -> None:
    found = [Counter(roles.values()) for roles in candidate_roles(cluster(*[Role.MIXED] * 4), MODEL)]
    assert found == [
        {Role.MIXED: 4},
        {Role.MIXED: 3, Role.PREFILL: 1},
        {Role.MIXED: 2, Role.PREFILL: 2},
        {Role.DECODE: 4},
    ]


def test_a_large_cluster_also_tries_a_quarter() -> None:
    assert words(cluster(*[Role.PREFILL] * 8, *[Role.DECODE] * 8)) == [
        "8 prefill, 8 decode",
        "9 prefill, 7 decode",
        "7 prefill, 9 decode",
        "12 prefill, 4 decode",
        "4 prefill, 12 decode",
        "16 decode",
    ]


def test_a_session_can_always_begin() -> None:
    assert words(cluster(Role.DECODE)) == ["1 decode"]
    assert words(cluster(Role.PREFILL, Role.DECODE)) == ["1 prefill, 1 decode", "2 decode"]


def test_one_worker_of_each_parallelism_is_moved() -> None:
    workers = [
        WorkerView("small", Role.PREFILL, Parallelism(1)),
        WorkerView("large", Role.PREFILL, Parallelism(4)),
        WorkerView("d", Role.DECODE, Parallelism(4)),
    ]
    decoding = [
        {name for name, role in each.items() if role is Role.DECODE} for each in candidate_roles(workers, MODEL)
    ]
    assert {"d", "small"} in decoding
    assert {"d", "large"} in decoding


def test_the_decode_worker_with_the_least_kv_turns_first() -> None:
    workers = [
        WorkerView("p", Role.PREFILL),
        WorkerView("full", Role.DECODE, held_tokens={"s": 900}),
        WorkerView("empty", Role.DECODE),
    ]
    roles = next(each for each in candidate_roles(workers, MODEL) if in_words(each) == "2 prefill, 1 decode")
    assert roles["full"] is Role.DECODE
