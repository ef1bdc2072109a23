"""Arrow's pools: exact examples of every rule."""

import random
from dataclasses import replace

from ampd.policies.arrow import Pool, pool_of
from ampd.policies.base import RoleChange
from ampd.policies.estimates import queued_s
from ampd.policies.registry import create
from ampd.types import Role, Window, WorkerView
from tests.ampd.policies import situations
from tests.ampd.policies.pools_lab import (
    CARRIED,
    LATE,
    LONG,
    MODEL,
    NEVER,
    OVERLOADED,
    SLO,
    TP4,
    decode,
    prefill,
    waiting,
)


def left_over(worker: WorkerView) -> WorkerView:
    """A decode worker with a prefill of a session whose history is elsewhere: from its time as a prefill worker."""
    return replace(worker, queue=waiting(500, hist_tokens=800))


def arrow(*workers: WorkerView, since_s: float = NEVER, seed: int = 0, **parameters: float) -> list[RoleChange]:
    policy = create("pools", "arrow", **parameters)
    return list(situations.change(policy, workers, SLO, MODEL, 100.0, since_s, random.Random(seed)))


def test_the_examples_are_what_they_say() -> None:
    assert queued_s(OVERLOADED, MODEL) > 2 * SLO.ttft_s
    assert MODEL.prefill_s(0, LONG, TP4) < SLO.ttft_s
    assert CARRIED > 20


def test_the_four_pools() -> None:
    assert pool_of(prefill("p", 500)) is Pool.PREFILL
    assert pool_of(prefill("p", 500, batch=1)) is Pool.TO_PREFILL
    assert pool_of(decode("d", batch=3)) is Pool.DECODE
    assert pool_of(left_over(decode("d"))) is Pool.TO_DECODE


def test_a_decode_worker_that_prefills_its_own_session_is_no_worker_on_its_way() -> None:
    own = left_over(decode("d"))
    assert pool_of(replace(own, held_tokens={"s0": 800})) is Pool.DECODE
    assert pool_of(replace(own, held_tokens={"s0": 799})) is Pool.TO_DECODE  # a prefill worker keeps prefixes, too
    assert pool_of(replace(own, queue=waiting(500))) is Pool.TO_DECODE  # a first round: cannot be told apart


def test_a_predicted_miss_of_ttft_turns_the_decode_worker_with_the_fewest_running_tokens() -> None:
    assert arrow(OVERLOADED, decode("d1", 3), decode("d2", 2)) == [RoleChange("d2", Role.PREFILL, "ttft-miss")]


def test_a_worker_that_is_still_on_its_way_to_decode_goes_first() -> None:
    workers = OVERLOADED, left_over(decode("d1", 3)), decode("d2", 2)
    assert arrow(*workers) == [RoleChange("d1", Role.PREFILL, "ttft-miss")]


def test_one_prefill_worker_that_meets_the_target_is_enough_also_one_that_still_decodes() -> None:
    for free in (prefill("free"), prefill("free", batch=2)):
        assert arrow(OVERLOADED, free, decode("d1", 3), decode("d2", 2)) == []


def test_the_next_round_is_expected_to_be_like_those_that_wait() -> None:
    """An empty queue, and work that takes longer than the target anywhere: another worker would be of no use."""
    endless = prefill("p1", 200_000)
    assert MODEL.prefill_s(0, 200_000, TP4) > SLO.ttft_s
    assert arrow(endless, prefill("p2"), decode("d1"), decode("d2")) == []


def test_a_decode_worker_with_a_longer_queue_would_not_help() -> None:
    busier = [replace(decode(name), queue=waiting(*[LONG] * 9)) for name in ("d1", "d2")]
    assert arrow(OVERLOADED, *busier) == []


def test_nobody_leaves_where_the_others_could_not_carry_the_batch() -> None:
    """Two workers with `n` sequences each: those of both may be 0.6 of what the one that stays carries."""
    for share, leaves in ((0.29, True), (0.31, False)):
        n = int(CARRIED * share)
        assert bool(arrow(OVERLOADED, decode("d1", n), decode("d2", n))) is leaves


def test_what_a_worker_can_carry_ends_with_its_memory() -> None:
    few = [decode(name, 4, kv_tokens=10_000) for name in ("d1", "d2")]
    assert arrow(OVERLOADED, *few) == []  # 8 of the 10 sequences that the one left could hold
    assert arrow(OVERLOADED, *[replace(member, kv_capacity_tokens=100_000) for member in few]) != []


def test_decode_that_misses_its_target_keeps_its_workers() -> None:
    assert arrow(OVERLOADED, decode("d1", 1, LATE), decode("d2", 1, LATE)) == []


def test_the_last_decode_worker_stays_and_the_last_of_the_largest() -> None:
    assert arrow(OVERLOADED, decode("d1", 2)) == []
    small, large = decode("small", 5, kv_tokens=50_000), decode("large", 2, kv_tokens=90_000)
    assert arrow(OVERLOADED, small, large) == [RoleChange("small", Role.PREFILL, "ttft-miss")]


def test_a_cluster_of_decode_workers_gets_a_prefill_worker_when_prefills_wait() -> None:
    busy = replace(decode("d1", 2), queue=waiting(LONG, LONG))
    assert arrow(decode("d1", 2), decode("d2", 2)) == []
    assert arrow(busy, decode("d2", 2)) != []


def test_nothing_changes_within_the_cooldown() -> None:
    workers = OVERLOADED, decode("d1", 3), decode("d2", 2)
    assert arrow(*workers, since_s=99.01) == []
    assert arrow(*workers, since_s=99.0) != []
    assert arrow(*workers, since_s=99.0, cooldown_s=1.5) == []


def test_late_tokens_turn_the_prefill_worker_with_the_least_queued_work() -> None:
    workers = prefill("p1", LONG), prefill("p2", 100), decode("d", 50, LATE)
    assert arrow(*workers) == [RoleChange("p2", Role.DECODE, "itl-miss")]


def test_a_prefill_worker_that_still_decodes_goes_first() -> None:
    workers = prefill("p1", LONG, batch=1), prefill("p2"), decode("d", 50, LATE)
    assert arrow(*workers) == [RoleChange("p1", Role.DECODE, "itl-miss")]


def test_the_interval_is_the_mean_over_all_tokens() -> None:
    few, many = Window(0.1, 10), Window(0.03, 1000)
    assert arrow(prefill("p1"), prefill("p2"), decode("d1", 9, few), decode("d2", 9, many)) == []
    assert arrow(prefill("p1"), prefill("p2"), decode("d1", 9, replace(few, count=1000)), decode("d2", 9, many)) != []


def test_an_empty_decode_worker_is_help_enough() -> None:
    assert arrow(prefill("p1"), prefill("p2"), decode("d1", 50, LATE), decode("new")) == []


def test_idle_prefill_workers_help_a_decode_pool_that_is_nearly_full() -> None:
    for share, turns in ((0.85, True), (0.75, False)):
        full = decode("d", int(CARRIED * share), Window(0.03, 100))
        changes = arrow(prefill("p1"), prefill("p2"), full)
        assert [change.reason for change in changes] == (["prefill-idle"] if turns else [])
        assert arrow(prefill("p1", 100), prefill("p2"), full) == [], "has work"
        assert arrow(prefill("p1", ttft=Window(0.6, 3)), prefill("p2"), full) == [], "had work"
        assert arrow(prefill("p1"), full) == [], "the last one"
