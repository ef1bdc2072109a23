"""Our pools: exact examples of both changes, and what never happens: flip-flop, no decode worker, haste."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ampd.perf.model import PerformanceModel
from ampd.policies.base import RoleChange
from ampd.policies.estimates import queued_s
from ampd.policies.pools.predictive import PredictivePools
from ampd.types import Role, Slo, WorkerView
from tests.ampd.policies import routing_lab, situations
from tests.ampd.policies.pools_lab import MODEL as REAL
from tests.ampd.policies.pools_lab import NEVER, TP4, loads, with_constants

PLAIN = routing_lab.PLAIN
SLO = Slo(1.0, 0.04)
POLICY = PredictivePools()
untimed = settings(deadline=None)


def prefill(name: str, *queue: int) -> WorkerView:
    return routing_lab.prefill(name, *queue)


def decode(name: str, batch: int = 0, *queue: int) -> WorkerView:
    return routing_lab.decode(*queue, batch=batch, name=name)


def changes(
    *workers: WorkerView,
    policy: PredictivePools = POLICY,
    now_s: float = 100.0,
    changed_s: float = NEVER,
    seed: int = 0,
    model: PerformanceModel = PLAIN,
    slo: Slo = SLO,
) -> list[RoleChange]:
    return list(situations.change(policy, workers, slo, model, now_s, changed_s, random.Random(seed)))


FULL = 400
"""410 ms of work in `PLAIN`; two of them are more than half a TTFT target, as is one of 500."""
LATE = 500


# `PLAIN`: steps of 5 ms and 1 ms a sequence; the targets' shares are 24 ms (0.6) and 14 ms (0.35).


def test_decode_that_is_short_gets_the_prefill_worker_with_the_least_work() -> None:
    workers = prefill("p1", FULL), prefill("p2", 10), prefill("p3", 20)
    assert changes(*workers, decode("d", 20)) == [RoleChange("p2", Role.DECODE, "itl-short")]
    assert changes(*workers, decode("d", 19)) == []


def test_the_mean_over_the_decode_workers_counts() -> None:
    assert changes(prefill("p"), decode("d1", 30), decode("d2", 8)) == []
    assert changes(prefill("p"), decode("d1", 30), decode("d2", 9)) == [RoleChange("p", Role.DECODE, "itl-short")]


def test_the_last_prefill_worker_goes_too() -> None:
    assert changes(prefill("p", FULL), decode("d", 50)) == [RoleChange("p", Role.DECODE, "itl-short")]
    assert changes(decode("d", 50)) == []


def test_prefill_that_is_short_gets_the_decode_worker_with_the_smallest_batch() -> None:
    late = prefill("p", LATE)
    assert changes(late, decode("d1", 4), decode("d2", 3), decode("d3", 5)) == [
        RoleChange("d2", Role.PREFILL, "ttft-short")
    ]


def test_every_prefill_worker_must_be_late() -> None:
    ds = decode("d1", 1), decode("d2", 1)
    assert changes(prefill("p1", LATE), prefill("p2", 480), *ds) == []
    assert changes(prefill("p1", LATE), prefill("p2", 491), *ds) != []
    assert changes(prefill("p1", LATE), prefill("p2"), *ds) == []


def test_without_prefill_workers_the_decode_workers_queues_count() -> None:
    assert changes(decode("d1", 2, LATE), decode("d2", 1, LATE)) == [RoleChange("d2", Role.PREFILL, "ttft-short")]
    assert changes(decode("d1", 2, LATE), decode("d2", 1)) == []


def test_who_stays_must_carry_the_batches_with_room_to_spare() -> None:
    late = prefill("p", LATE)
    # One instead of two: 8 sequences are 13 ms, 9 and 10 are 14 and more.
    assert changes(late, decode("d1", 4), decode("d2", 4)) != []
    assert changes(late, decode("d1", 5), decode("d2", 4)) == []
    # Two instead of three: 8 each.
    assert changes(late, decode("d1", 8), decode("d2", 4), decode("d3", 4)) != []
    assert changes(late, decode("d1", 10), decode("d2", 4), decode("d3", 4)) == []


def test_the_last_decode_worker_stays() -> None:
    assert changes(prefill("p", LATE), decode("d", 0)) == []


def test_a_cluster_without_a_decode_worker_gets_one() -> None:
    """All of them are gone: no session could begin."""
    assert changes(prefill("p1", FULL), prefill("p2")) == [RoleChange("p2", Role.DECODE, "itl-short")]
    assert changes() == []


def test_nothing_within_the_cooldown() -> None:
    workers = prefill("p"), decode("d", 50)
    assert changes(*workers, changed_s=95.1) == []
    assert changes(*workers, changed_s=95.0) != []
    assert changes(*workers, changed_s=95.0, policy=with_constants(PredictivePools, COOLDOWN_S=6.0)) == []


def test_equal_workers_are_chosen_by_dice() -> None:
    workers = prefill("p1"), prefill("p2"), decode("d", 50)
    assert {changes(*workers, seed=seed)[0].worker_id for seed in range(30)} == {"p1", "p2"}


@st.composite
def members(draw: st.DrawFn) -> list[WorkerView]:
    count = draw(st.integers(1, 6))
    return [draw(loads(WorkerView(f"w{number}", draw(st.sampled_from(list(Role))), TP4))) for number in range(count)]


slos = st.builds(Slo, st.floats(0.05, 5), st.floats(0.008, 0.1))


@untimed
@given(members(), slos, st.integers(0, 5))
def test_at_most_one_changes_sides_and_an_owner_stays(workers: list[WorkerView], slo: Slo, seed: int) -> None:
    for change in changes(*workers, model=REAL, slo=slo, seed=seed):
        (changed,) = [member for member in workers if member.worker_id == change.worker_id]
        assert changed.role is not change.role
        assert change.label == ""
        assert turned(workers, [change])
        assert any(member.role.owns_sessions for member in turned(workers, [change]))
    assert len(changes(*workers, model=REAL, slo=slo, seed=seed)) <= 1


@pytest.mark.slow
@untimed
@given(members(), slos)
def test_an_idle_cluster_is_left_alone(workers: list[WorkerView], slo: Slo) -> None:
    assume(any(member.role is Role.DECODE for member in workers))
    idle = [replace(member, queue=(), decode_batch=0, decode_context_tokens=0) for member in workers]
    assert changes(*idle, model=REAL, slo=slo) == []


def turned(workers: Sequence[WorkerView], made: Sequence[RoleChange]) -> list[WorkerView]:
    roles = {change.worker_id: change.role for change in made}
    return [replace(member, role=roles.get(member.worker_id, member.role)) for member in workers]


@pytest.mark.slow
@untimed
@given(members(), slos, st.booleans())
def test_a_load_that_stays_turns_nobody_to_and_fro(workers: list[WorkerView], slo: Slo, moves: bool) -> None:
    """Batches stay with their workers, or spread over the decode workers as sessions end and others begin."""
    flips: list[Role] = []
    batch = sum(member.decode_batch for member in workers)
    context_tokens = sum(member.decode_context_tokens for member in workers)
    for _ in range(8):
        made = changes(*workers, model=REAL, slo=slo)
        flips += [change.role for change in made]
        workers = turned(workers, made)
        if moves:
            workers = spread(workers, batch, context_tokens)
    assert all(earlier is later for earlier, later in pairwise(flips)), flips


def spread(workers: list[WorkerView], batch: int, context_tokens: int) -> list[WorkerView]:
    count = sum(member.role is Role.DECODE for member in workers)
    return [
        replace(member, decode_batch=batch // count, decode_context_tokens=context_tokens // count)
        if member.role is Role.DECODE
        else replace(member, decode_batch=0, decode_context_tokens=0)
        for member in workers
    ]


def test_a_new_decode_worker_is_not_taken_back_before_it_has_sessions() -> None:
    """Where reading the weights takes most of a step, spread batches look lighter than they are."""

    class Heavy(routing_lab.PlainModel):
        def decode_step_s(self, batch: int, context_tokens: int, parallelism: object) -> float:  # noqa: ARG002
            return (22 + 0.25 * batch) / 1000 if batch > 0 else 0.0

    before = [prefill("p", LATE), decode("d", 9, LATE)]
    made = changes(*before, model=Heavy())
    assert made == [RoleChange("p", Role.DECODE, "itl-short")]
    assert changes(*turned(before, made), model=Heavy()) == []


@pytest.mark.parametrize("queue", [0, 100, 489])
def test_work_of_less_than_half_a_target_is_nothing_to_change_for(queue: int) -> None:
    worker = prefill("p", queue) if queue else prefill("p")
    assert queued_s(worker, PLAIN) <= 0.5 * SLO.ttft_s
    assert changes(worker, decode("d1"), decode("d2")) == []


def test_the_decode_worker_with_the_most_kv_memory_stays() -> None:
    late = prefill("p", LATE)
    large, small = (
        replace(decode(name, batch), kv_capacity_tokens=tokens)
        for name, batch, tokens in (("large", 0, 900), ("small", 4, 300))
    )
    assert changes(late, large, small) == [RoleChange("small", Role.PREFILL, "ttft-short")]
    twin = replace(large, worker_id="twin", decode_batch=2)
    assert changes(late, large, twin, small) == [RoleChange("large", Role.PREFILL, "ttft-short")]


# -- memory


def holding(worker: WorkerView, used: int) -> WorkerView:
    return replace(worker, kv_used_tokens=used, kv_capacity_tokens=1000)


def test_the_store_counts_where_there_is_one() -> None:
    used = [replace(holding(decode(name), 900), store_capacity_tokens=1000) for name in ("d1", "d2")]
    assert changes(prefill("p"), *used) == []
    stored = [replace(worker, store_used_tokens=950) for worker in used]
    assert changes(prefill("p"), *stored) == [RoleChange("p", Role.DECODE, "kv-short")]


def test_decode_workers_short_of_memory_get_a_prefill_worker() -> None:
    assert changes(prefill("p"), holding(decode("d1"), 700), holding(decode("d2"), 900)) == []
    assert changes(prefill("p"), holding(decode("d1"), 750), holding(decode("d2"), 900)) == [
        RoleChange("p", Role.DECODE, "kv-short")
    ]


def test_who_holds_what_the_others_could_not_grow_with_stays() -> None:
    late = prefill("p", LATE, LATE)
    assert changes(late, holding(decode("d1"), 200), holding(decode("d2", 1), 200)) == [
        RoleChange("d1", Role.PREFILL, "ttft-short")
    ]
    assert changes(late, holding(decode("d1"), 210), holding(decode("d2", 1), 200)) == []


# -- mixed workers


def mixed(name: str, batch: int, *queue: int) -> WorkerView:
    return replace(decode(name, batch, *queue), role=Role.MIXED)


def test_a_mixed_worker_counts_on_both_sides() -> None:
    assert changes(prefill("p"), mixed("m", 20)) == [RoleChange("p", Role.DECODE, "itl-short")]
    assert changes(prefill("p", LATE), mixed("m1", 1), mixed("m2", 1, LATE)) == [], "the first one has time"
    assert changes(prefill("p", LATE), mixed("m1", 2, LATE), mixed("m2", 1, LATE)) == [
        RoleChange("m2", Role.PREFILL, "ttft-short")
    ]
    assert changes(mixed("m1", 50), mixed("m2", 50)) == [], "no worker is left to change"
