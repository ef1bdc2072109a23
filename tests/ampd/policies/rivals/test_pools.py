"""Pools policies: exact examples of every rule, and what no policy ever does, whatever it sees."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.piecewise import load_performance_model
from ampd.policies.base import PoolsPolicy, RoleChange
from ampd.policies.estimates import queued_s
from ampd.policies.registry import POOLS, create
from ampd.policies.rivals.arrow import Pool, pool_of
from ampd.policies.rivals.laps import LANES
from ampd.types import Parallelism, PrefillTask, Role, Slo, Window, WorkerView
from tests.ampd.policies import situations

MODEL = load_performance_model("qwen3-32b-h20")
SLO = Slo(ttft_s=1.0, itl_s=0.04)
TP4 = Parallelism(4)
NEVER = -math.inf
EMPTY = Window()
LATE = Window(0.05, 100)
"""Token intervals above the target."""


def waiting(*incr_tokens: int, hist_tokens: int = 0) -> tuple[PrefillTask, ...]:
    return tuple(
        PrefillTask(f"t{index}", f"s{index}", hist_tokens, tokens, 0.0, SLO) for index, tokens in enumerate(incr_tokens)
    )


def prefill(name: str, *queue: int, batch: int = 0, ttft: Window = EMPTY, lane: str = "") -> WorkerView:
    return WorkerView(
        name,
        Role.PREFILL,
        TP4,
        waiting(*queue),
        ttft,
        decode_batch=batch,
        decode_context_tokens=1000 * batch,
        lane=lane,
    )


def decode(name: str, batch: int = 0, itl: Window = EMPTY, kv_tokens: int = 0) -> WorkerView:
    return WorkerView(
        name,
        Role.DECODE,
        TP4,
        itl=itl,
        decode_batch=batch,
        decode_context_tokens=1000 * batch,
        kv_capacity_tokens=kv_tokens,
    )


def left_over(worker: WorkerView) -> WorkerView:
    """A decode worker with a prefill of a session whose history is elsewhere: from its time as a prefill worker."""
    return replace(worker, queue=waiting(500, hist_tokens=800))


def arrow(*workers: WorkerView, since_s: float = NEVER, seed: int = 0, **parameters: float) -> list[RoleChange]:
    policy = create("pools", "arrow", **parameters)
    return list(situations.change(policy, workers, SLO, MODEL, 100.0, since_s, random.Random(seed)))


def laps(*workers: WorkerView, since_s: float = NEVER) -> list[RoleChange]:
    return list(situations.change(create("pools", "laps"), workers, SLO, MODEL, 100.0, since_s, random.Random(0)))


LONG = 4000
OVERLOADED = prefill("p", *[LONG] * 6)
"""Several seconds of work: who comes now misses a target of one second."""
CARRIED = next(n for n in range(1, 4096) if MODEL.decode_step_s(n + 1, 1000 * (n + 1), TP4) > SLO.itl_s)
"""Sequences of 1000 tokens that one of these workers decodes within the target."""


def test_the_examples_are_what_they_say() -> None:
    assert queued_s(OVERLOADED, MODEL) > 2 * SLO.ttft_s
    assert MODEL.prefill_s(0, LONG, TP4) < SLO.ttft_s
    assert CARRIED > 20


# -- arrow: the pools


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


# -- arrow: D -> P


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


# -- arrow: P -> D


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


# -- laps


def lanes(*names: str) -> list[WorkerView]:
    return [prefill(f"p{number}", lane=lane) for number, lane in enumerate(names)]


def joined(changes: list[RoleChange]) -> list[tuple[str, str]]:
    return [(change.worker_id, change.lane) for change in changes]


def test_workers_without_a_lane_get_the_smaller_one_at_once() -> None:
    changes = laps(*lanes("", "", ""), decode("d"), since_s=99.9)
    assert joined(changes) == [("p0", "short"), ("p1", "long"), ("p2", "short")]
    assert {(change.role, change.reason) for change in changes} == {(Role.PREFILL, "joined")}
    assert joined(laps(*lanes("short", "short", "long", ""))) == [("p3", "long")]


def test_too_few_workers_have_no_lanes() -> None:
    assert laps(*lanes("")) == []


def test_a_worker_follows_the_pressure() -> None:
    short0, short1, long0, long1 = lanes("short", "short", "long", "long")
    pressed = replace(long0, queue=waiting(LONG, LONG, LONG))
    busy = replace(short0, queue=waiting(100))
    assert laps(busy, short1, pressed, long1) == [RoleChange("p1", Role.PREFILL, "pressure", "long")]
    pressed, busy = replace(short0, queue=pressed.queue), replace(long0, queue=busy.queue)
    assert laps(pressed, short1, busy, long1) == [RoleChange("p3", Role.PREFILL, "pressure", "short")]


def test_pressures_must_differ_by_more_than_tau() -> None:
    def pressed(worker: WorkerView, share: float) -> WorkerView:
        return replace(worker, ttft=Window((1.0 + share) * SLO.ttft_s, 3))

    short0, short1, long0, long1 = lanes("short", "short", "long", "long")
    for share, moves in ((0.16, True), (0.14, False)):
        changes = laps(pressed(short0, 0.1), pressed(short1, 0.1), pressed(long0, share), pressed(long1, share))
        assert bool(changes) is moves


def test_a_lane_is_as_pressed_as_its_90th_percentile() -> None:
    """One of ten workers in trouble does not count; two do."""
    late = Window(3.0, 3)
    short, long = lanes("short", "short"), lanes(*["long"] * 10)
    long = [replace(worker, worker_id=f"l{number}") for number, worker in enumerate(long)]
    for troubled, moves in ((1, False), (2, True)):
        pressed = [replace(worker, ttft=late) for worker in long[:troubled]] + long[troubled:]
        assert bool(laps(*short, *pressed)) is moves


def test_a_prefill_that_computes_is_no_pressure_and_one_that_waits_is() -> None:
    short0, short1, long0 = lanes("short", "short", "long")
    assert laps(short0, short1, replace(long0, queue=waiting(LONG))) == []
    assert laps(short0, short1, replace(long0, queue=waiting(LONG, LONG))) != []
    little = replace(long0, queue=waiting(LONG, 16))
    assert MODEL.prefill_s(0, 16, TP4) < 0.1 * SLO.ttft_s
    assert laps(short0, short1, little) == []  # less than what a busy worker is good for


def test_a_worker_stays_in_each_lane_and_a_lane_that_lost_its_own_is_filled_up() -> None:
    short, long = lanes("short", "long")
    assert laps(short, replace(long, queue=waiting(LONG, LONG, LONG))) == []
    assert joined(laps(*lanes("long", "long"))) in ([("p0", "short")], [("p1", "short")])
    assert laps(*lanes("long", "long"))[0].reason == "refill"
    assert laps(*lanes("long", "long"), since_s=99.0) == []


# -- all of them


def test_the_static_pools_stay() -> None:
    static = create("pools", "static")
    assert (
        list(
            situations.change(
                static, (OVERLOADED, decode("d1"), decode("d2")), SLO, MODEL, 0.0, NEVER, random.Random(0)
            )
        )
        == []
    )


@pytest.mark.parametrize("name", POOLS.names())
@pytest.mark.parametrize("prefills", [0, 1, 2, 4])
@pytest.mark.parametrize("decodes", [1, 3])
def test_an_idle_balanced_cluster_is_left_alone(name: str, prefills: int, decodes: int) -> None:
    policy = create("pools", name)
    idle = lanes("short", "long", "short", "long")[:prefills]
    if name != "laps" or prefills < 2:
        idle = [replace(worker, lane="") for worker in idle]
    workers = [*idle, *(decode(f"d{number}") for number in range(decodes))]
    assert list(situations.change(policy, workers, SLO, MODEL, 0.0, NEVER, random.Random(0))) == []


tasks = st.lists(
    st.builds(
        lambda number, hist, incr: PrefillTask(f"t{number}", f"s{number}", hist, incr, 0.0, SLO),
        st.integers(0, 5),
        st.integers(0, 20_000),
        st.integers(1, 20_000),
    ),
    max_size=5,
).map(tuple)
windows = st.builds(Window, st.floats(0, 5), st.integers(0, 50)).map(
    lambda window: window if window.count else Window()
)


@st.composite
def loads(draw: st.DrawFn, worker: WorkerView) -> WorkerView:
    batch = draw(st.integers(0, 60))
    return replace(
        worker,
        queue=draw(tasks),
        ttft=draw(windows),
        itl=replace(draw(windows), mean_s=draw(st.floats(0, 0.1))),
        decode_batch=batch,
        decode_context_tokens=batch * draw(st.integers(1, 20_000)),
        held_tokens=draw(st.dictionaries(st.sampled_from(["s0", "s1"]), st.integers(1, 20_000))),
    )


@st.composite
def histories(draw: st.DrawFn) -> tuple[PoolsPolicy, list[tuple[float, list[WorkerView]]]]:
    """A policy, and a cluster as it looks from moment to moment, under any load and with the roles of the start."""
    policy = create("pools", draw(st.sampled_from(["arrow", "laps"])), cooldown_s=draw(st.floats(0, 3)))
    sizes = draw(st.lists(st.sampled_from([0, 50_000, 90_000]), min_size=2, max_size=6))
    members = [
        WorkerView(f"w{number}", Role.PREFILL, Parallelism(draw(st.sampled_from([1, 4]))), kv_capacity_tokens=size)
        for number, size in enumerate(sizes)
    ]
    cut = draw(st.integers(0, len(members) - 1))
    members[cut:] = [replace(member, role=Role.DECODE) for member in members[cut:]]
    now_s, moments = 0.0, []
    for _ in range(draw(st.integers(1, 8))):
        now_s += draw(st.floats(0.01, 2))
        moments.append((now_s, [draw(loads(member)) for member in members]))
    return policy, moments


@pytest.mark.slow
@given(histories(), st.integers(0, 5))
def test_no_role_is_ever_emptied_no_two_flips_fall_within_a_cooldown_and_every_session_still_fits_somewhere(
    history: tuple[PoolsPolicy, list[tuple[float, list[WorkerView]]]], seed: int
) -> None:
    policy, moments = history
    rng = random.Random(seed)
    roles = {member.worker_id: member.role for member in moments[0][1]}
    lanes_of = dict.fromkeys(roles, "")
    changed_s, flips = NEVER, []
    had = set(roles.values())
    for now_s, members in moments:
        seen = [replace(member, role=roles[member.worker_id], lane=lanes_of[member.worker_id]) for member in members]
        changes = situations.change(policy, seen, SLO, MODEL, now_s, changed_s, rng)
        for change in changes:
            assert (change.role, change.lane) != (roles[change.worker_id], lanes_of[change.worker_id])
            if change.role is not roles[change.worker_id] or lanes_of[change.worker_id]:
                flips.append(now_s)
            roles[change.worker_id], lanes_of[change.worker_id] = change.role, change.lane
        changed_s = now_s if changes else changed_s
        assert had <= set(roles.values())
        assert _largest([replace(member, role=roles[member.worker_id]) for member in seen]) >= _largest(seen)
        counts = Counter(lane for lane in lanes_of.values() if lane)
        assert not counts or set(counts) == set(LANES)
    for earlier, later in pairwise(flips):
        assert later - earlier >= policy.cooldown_s  # type: ignore[attr-defined]
        assert later > earlier, "one at a time"


def _largest(members: list[WorkerView]) -> float:
    return max(member.kv_capacity_tokens or math.inf for member in members if member.role is Role.DECODE)
