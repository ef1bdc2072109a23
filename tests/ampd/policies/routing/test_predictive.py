"""Our routing: exact examples of offers, losses and reasons, and what holds whatever the cluster looks like."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.estimates import NO_PREFILL_WORKER
from ampd.policies.routing.predictive import PredictiveRouting
from ampd.types import Parallelism, PrefillTask, Role, Route, RouteDecision, Slo, Window, WorkerView
from tests.ampd.policies import situations
from tests.ampd.policies.routing.test_properties import clusters
from tests.ampd.policies.routing_lab import PLAIN, SLO, decode, prefill, queue_of, round_of
from tests.ampd.policies.routing_lab import route as route_by

REAL = load_performance_model("qwen3-32b-h20")
TP4 = Parallelism(4)
EXACT = PredictiveRouting(spread=0.0)
NOTHING = Window()
untimed = settings(deadline=None)


def route(
    task: PrefillTask,
    own: WorkerView,
    *workers: WorkerView,
    now_s: float = 0.0,
    seed: int = 0,
    policy: PredictiveRouting = EXACT,
) -> RouteDecision:
    return situations.route(policy, task, own, workers, PLAIN, now_s, random.Random(seed))


def own_of(batch: int, *queue: int, itl: Window = NOTHING) -> WorkerView:
    return replace(decode(*queue, batch=batch), itl=itl)


def ahead(name: str, *rows: tuple[int, float]) -> WorkerView:
    """A prefill worker whose queue has (tokens, TTFT target)."""
    queue = [PrefillTask(f"q{i}", f"o{i}", 0, incr, 0.0, Slo(ttft_s, 0.04)) for i, (incr, ttft_s) in enumerate(rows)]
    return replace(prefill(name), queue=tuple(queue))


# -- offers


def test_it_goes_where_it_ends_first() -> None:
    # 110 ms of prefill. Remote: queues of 60, 40 and 50 ms; local: 90 ms.
    decision = route(round_of(0, 100), own_of(0, 80), prefill("a", 50), prefill("b", 30), prefill("c", 40))
    assert (decision.route, decision.worker_id, decision.reason) == (Route.REMOTE, "b", "on-time")
    there, here = decision.estimates
    assert (there.queue_s, there.prefill_s, there.transfer_s) == pytest.approx((0.04, 0.11, 0.0))
    assert there.total_s == pytest.approx(0.15)
    assert (here.route, here.worker_id) == (Route.LOCAL, "d")
    assert here.total_s == pytest.approx(0.2)
    assert route(round_of(0, 100), own_of(0, 20), prefill("a", 50), prefill("b", 30)).worker_id == "d"


def test_only_the_history_that_a_worker_lacks_is_moved() -> None:
    # 10 us a token: 50 ms for 5000 tokens.
    here, there = own_of(0, 25), prefill("p")
    assert route(round_of(5000, 100), here, there).worker_id == "d"
    holder = replace(there, held_tokens={"s": 3000, "other": 5000})
    decision = route(round_of(5000, 100), here, holder)
    assert (decision.worker_id, decision.estimates[0].transfer_s) == ("p", pytest.approx(0.02))
    assert route(round_of(5000, 100), here, replace(there, held_tokens={"s": 9000})).estimates[0].transfer_s == 0.0


def test_short_prefills_of_a_queue_share_a_pass() -> None:
    # The shortest pass takes 26 ms; below 52 ms a prefill shares: only the first pays the 26.
    queued = route(round_of(0, 100), own_of(0, 900), prefill("p", 30, 200, 20, 5, 41, 42)).estimates[0].queue_s
    assert queued == pytest.approx(0.040 + 0.210 + 0.004 + 0.0 + 0.025 + 0.052)


def test_the_batch_stretches_queue_and_prefill() -> None:
    # With the round 15 sequences: steps of 20 of 36.8 ms leave 45.65 %.
    share = 1 - 0.020 / (0.92 * 0.04)
    decision = route(round_of(0, 100), own_of(14, 40), prefill("p", 900))
    assert decision.route is Route.LOCAL
    here = decision.estimates[0]
    assert (here.prefill_s, here.queue_s) == pytest.approx((0.11 / share, 0.05 / share))
    assert here.total_s == pytest.approx(0.16 / share)
    # On an empty worker it takes its plain time.
    assert route(round_of(0, 100), own_of(0, 40), prefill("p", 900)).estimates[0].total_s == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("incr", "most_batch"), [(2600, 21), (42, 26), (16, 30)], ids=["saves nearly all", "saves half", "saves nothing"]
)
@pytest.mark.parametrize("more", [-1, 0, 1, 30])
def test_local_only_while_the_batch_leaves_what_leaving_would_save(incr: int, most_batch: int, more: int) -> None:
    """The hand-over of a remote prefill takes the batch 26 ms. 2.61 s of prefill leave it 99 % of the least share (24.8
    %), 52 ms leave it half (12.5 %), and 26 ms nothing: then any share is enough."""
    # A step of batch + 6 ms: 27 of 36.8 leave 26.6 %, 28 leave 23.9 %, 32 leave 13 %, 33 leave 10.3 %, 36 leave 2 %.
    decision = route(round_of(0, incr), own_of(most_batch + more), prefill("p", 900))
    assert len(decision.estimates) == 1 + (more <= 0), "what offers nothing is not in the record"
    assert more <= 0 or decision.route is Route.REMOTE


def test_a_short_prefill_stays_where_the_prefill_workers_are_late() -> None:
    """Elsewhere it would be late, and would pause the batch as long. A long one would pause the batch for longer."""
    full = ahead("p", *[(200, 1.0)] * 4)
    short = route(round_of(0, 16), own_of(24), full)
    assert (short.route, short.reason) == (Route.LOCAL, "on-time")
    long = route(round_of(0, 160), own_of(24), full)
    assert (long.route, long.reason) == (Route.REMOTE, "fewest-late")


# -- losses


def test_a_place_where_another_would_be_given_up_is_passed_over() -> None:
    # a: 110 ms due at 0.2, and the round's 110 ms, due at 0.25 or 0.21: then only one of them fits.
    # b: 120 ms that can wait: 110 + 120 ms by 1 s.
    task = round_of(0, 100, Slo(0.25, 0.04))
    a, b = ahead("a", (100, 0.2)), ahead("b", (110, 1.0))
    decision = route(task, own_of(60), a, b)
    assert (decision.worker_id, decision.reason) == ("a", "on-time"), "0.22 s is in time for both"
    task = round_of(0, 100, Slo(0.21, 0.04))
    decision = route(task, own_of(60), a, b)
    assert (decision.worker_id, decision.reason) == ("b", "on-time")
    assert decision.estimates[0].total_s == pytest.approx(0.23), "it overtakes the one that can wait"


def test_where_every_place_loses_somebody_the_least_loss_wins() -> None:
    task = round_of(0, 100, Slo(0.21, 0.04))
    a, b = ahead("a", (100, 0.2)), ahead("b", (101, 0.2))
    assert route(task, own_of(60), a, b).reason == "fewest-late"
    assert route(task, own_of(60), a, b).worker_id == "a", "of equals the earliest"
    missed = replace(b, queue=tuple(replace(queued, session_missed=True) for queued in b.queue))
    decision = route(task, own_of(60), a, missed)
    assert (decision.worker_id, decision.reason) == ("b", "fewest-late"), "it costs half"


def test_a_round_that_is_late_everywhere_goes_where_it_ends_first() -> None:
    # Here its 110 ms take 256 ms beside the batch, and 250 would be in time. There 310 ms of work are before it, and
    # either this or the round would be late.
    task = round_of(0, 100, Slo(0.25, 0.04))
    decision = route(task, own_of(15), ahead("p", (300, 0.4)))
    assert (decision.route, decision.reason) == (Route.LOCAL, "hopeless")
    assert decision.estimates[0].total_s < decision.estimates[1].total_s
    missed = route(replace(task, session_missed=True), own_of(15), ahead("p", *[(100, 0.25)] * 2, (10, 0.25)))
    assert missed.route is Route.LOCAL, "the other rounds weigh twice as much"


def test_what_is_late_anyway_is_no_loss() -> None:
    late = ahead("a", (100, 0.1), (200, 0.2))
    decision = route(round_of(0, 100, Slo(0.2, 0.04)), own_of(60), late)
    assert (decision.worker_id, decision.reason) == ("a", "on-time")


def test_others_of_a_local_queue_are_stretched_too() -> None:
    # Steps of 21 of 36.8 ms leave 43 %: 110 ms of prefill take 256, two of them 512.
    share = 1 - 0.021 / (0.92 * 0.04)
    task = round_of(0, 100, Slo(0.29, 0.04))
    assert 0.11 / share < 0.29
    for ttft_s, worker_id in ((0.5, "p"), (0.6, "d")):
        assert (2 * 0.11 / share < ttft_s) is (worker_id == "d")
        own = replace(own_of(15), queue=ahead("d", (100, ttft_s)).queue)
        decision = route(task, own, prefill("p", 5000))
        assert (decision.worker_id, decision.reason) == (worker_id, "on-time")


def test_a_round_that_nobody_can_serve_in_time_goes_where_it_ends_first() -> None:
    task = round_of(0, 2000, Slo(0.5, 0.04))
    decision = route(task, own_of(60), prefill("a", 50), prefill("b", 40))
    assert (decision.worker_id, decision.reason) == ("b", "hopeless")
    waited = round_of(0, 100, SLO, arrival_s=-0.9)
    assert route(waited, own_of(60), prefill("a")).reason == "hopeless"
    assert route(replace(waited, arrival_s=-0.8), own_of(60), prefill("a")).reason == "on-time"
    assert route(replace(waited, arrival_s=-0.8), own_of(60), prefill("a"), now_s=0.1).reason == "hopeless"


def test_only_so_many_offers_are_checked() -> None:
    """The earliest three cannot take it without a loss; the fourth could."""
    task = round_of(0, 100, Slo(0.21, 0.04))
    bad = [ahead(name, (100, 0.2)) for name in "abc"]
    good = ahead("g", (120, 1.0))
    assert route(task, own_of(60), *bad, good).worker_id == "g"
    few = situations.with_constants(EXACT, TRIES=3)
    assert route(task, own_of(60), *bad, good, policy=few).reason == "fewest-late"
    assert route(task, own_of(60), *bad[:2], good, policy=few).worker_id == "g"


# -- mixed workers


def mixed(name: str, batch: int, *queue: int, itl: Window = NOTHING) -> WorkerView:
    return replace(prefill(name, *queue), role=Role.MIXED, decode_batch=batch, itl=itl)


def test_a_round_leaves_for_a_mixed_worker_only_if_it_would_be_late() -> None:
    # 110 ms of prefill against 1 s. At the owner's share of 45.65 %, a queue of 300 ms ends after 0.9 s.
    own, idle = replace(own_of(14, 290), role=Role.MIXED), mixed("m", 0)
    stays = route(round_of(0, 100), own, idle)
    assert (stays.route, stays.reason) == (Route.LOCAL, "on-time"), "it would end earlier there, but is on time here"
    full = replace(own, queue=ahead("d", *[(200, 1.0)] * 4).queue)
    leaves = route(round_of(0, 100), full, idle)
    assert (leaves.worker_id, leaves.reason) == ("m", "on-time")
    assert [estimate.worker_id for estimate in leaves.estimates] == ["m", "d"]
    assert route(round_of(0, 100), full, prefill("p", 500), idle).worker_id == "p", "prefill workers come first"


def test_a_batch_that_leaves_too_little_time_takes_no_prefills_of_others() -> None:
    # 27 of 36.8 ms leave 26.6 %, 28 leave 23.9 %, which is less than a quarter.
    full = replace(own_of(14), queue=ahead("d", *[(200, 1.0)] * 4).queue, role=Role.MIXED)
    assert route(round_of(0, 100), full, mixed("m", 22)).worker_id == "m"
    assert route(round_of(0, 100), full, mixed("m", 23)).worker_id == "d"
    stretched = route(round_of(0, 100), full, mixed("m", 15)).estimates[0]
    assert stretched.prefill_s == pytest.approx(0.11 / (1 - 0.020 / (0.92 * 0.04))), "it is stretched as a local one"
    late = replace(mixed("m", 22), queue=ahead("m", *[(200, 1.0)] * 4).queue)
    assert route(round_of(0, 100), full, late).worker_id == "d", "rounds would be late there too"


def test_a_full_batch_is_no_reason_to_leave_for_another_batch() -> None:
    own = replace(own_of(60), role=Role.MIXED)
    stays = route(round_of(0, 100), own, mixed("m", 0))
    assert (stays.route, stays.reason) == (Route.LOCAL, "on-time")
    assert stays.estimates[0].prefill_s == pytest.approx(0.11 / EXACT.least_share)
    assert route(round_of(0, 100), own, mixed("m", 0), prefill("p")).worker_id == "p"


# -- who may take it


def test_its_own_worker_is_no_prefill_worker_for_it() -> None:
    """It may have become one, with this session still bound to it; the view may be another object."""
    own = replace(own_of(60), role=Role.PREFILL)
    for again in (own, replace(own)):
        assert route(round_of(0, 50), own, again).reason == NO_PREFILL_WORKER
        assert route(round_of(0, 50), own, again, prefill("p", 9000)).worker_id == "p"
        light = replace(again, decode_batch=2)
        decision = route(round_of(0, 50), light, replace(light), prefill("p", 9000))
        assert (decision.route, decision.worker_id) == (Route.LOCAL, "d")
        assert [estimate.worker_id for estimate in decision.estimates] == ["d", "p"]


def test_a_prompt_that_no_prefill_worker_takes_stays() -> None:
    assert route(round_of(500, 600), own_of(60), prefill("p", max_context=1000)).reason == NO_PREFILL_WORKER
    assert route(round_of(500, 600), own_of(60)).reason == NO_PREFILL_WORKER
    assert route(round_of(500, 500), own_of(60), prefill("p", max_context=1001)).worker_id == "p"
    chosen = route(round_of(500, 600), own_of(60), prefill("p", max_context=1000), prefill("q", 9000))
    assert chosen.worker_id == "q"


def test_equal_workers_get_equal_shares_and_nearly_equal_ones_too() -> None:
    for policy, queues in ((EXACT, (50, 50, 50)), (PredictiveRouting(), (50, 50, 51))):
        workers = [prefill(name, queue) for name, queue in zip("abc", queues, strict=True)]
        chosen = Counter(
            situations.route(policy, round_of(0, 300), own_of(60), workers, PLAIN, 0.0, random.Random(seed)).worker_id
            for seed in range(900)
        )
        assert chosen.keys() == set("abc")
        assert min(chosen.values()) > 240
    far = [prefill("a", 50), prefill("b", 71)]
    assert {
        route(round_of(0, 300), own_of(60), *far, seed=s, policy=PredictiveRouting()).worker_id for s in range(99)
    } == {"a"}


# -- whatever the cluster looks like


@untimed
@given(clusters(), st.integers(0, 40_000), st.integers(1, 20_000), st.integers(0, 9), st.floats(0, 3))
def test_the_record_holds_the_chosen_offer_and_the_best_of_the_other_route(
    cluster: tuple[WorkerView, tuple[WorkerView, ...]], hist: int, incr: int, seed: int, waited_s: float
) -> None:
    own, workers = cluster
    task = round_of(hist, incr)
    decision = situations.route(EXACT, task, own, workers, REAL, waited_s, random.Random(seed))
    assert decision.reason in {"on-time", "fewest-late", "hopeless", NO_PREFILL_WORKER}
    if decision.reason == NO_PREFILL_WORKER:
        assert (decision.route, decision.estimates) == (Route.LOCAL, ())
        return
    chosen, *others = decision.estimates
    assert (chosen.worker_id, chosen.route) == (decision.worker_id, decision.route)
    for estimate in decision.estimates:
        assert estimate.total_s == pytest.approx(estimate.prefill_s + estimate.queue_s + estimate.transfer_s)
        assert min(estimate.prefill_s, estimate.queue_s, estimate.transfer_s) >= 0
    for other in others:
        assert other.route is not chosen.route
    assert len(others) <= 1
    if decision.route is Route.LOCAL:
        able = [
            candidate
            for candidate in workers
            if candidate is not own and not 0 < candidate.max_context_tokens <= task.context_tokens
        ]
        assert bool(others) == bool(able)
    if decision.reason == "hopeless":
        assert all(chosen.total_s <= other.total_s for other in others)


def grown(worker: WorkerView, *incr_tokens: int) -> WorkerView:
    more = [replace(queued, task_id=f"more{i}") for i, queued in enumerate(queue_of(*incr_tokens))]
    return replace(worker, queue=(*worker.queue, *more))


@untimed
@given(
    clusters(),
    st.integers(0, 40_000),
    st.integers(1, 9000),
    st.integers(0, 20),
    st.integers(1, 20_000),
    st.integers(0, 5),
)
def test_more_work_at_a_worker_never_makes_it_more_likely(
    cluster: tuple[WorkerView, tuple[WorkerView, ...]], hist: int, incr: int, seed: int, more: int, which: int
) -> None:
    """Where nobody becomes late, and where only the earliest offer counts."""
    own, workers = cluster
    places = [own, *(candidate for candidate in workers if candidate is not own)]
    target = places[which % len(places)]
    swapped = {id(target): grown(target, more)}
    own2 = swapped.get(id(own), own)
    workers2 = tuple(swapped.get(id(candidate), candidate) for candidate in workers)
    task = round_of(hist, incr, Slo(1e6, 0.04))
    for policy in (PredictiveRouting(spread=1e-6), situations.with_constants(PredictiveRouting(spread=1e-6), TRIES=1)):
        before = situations.route(policy, task, own, workers, REAL, 0.0, random.Random(seed))
        after = situations.route(policy, task, own2, workers2, REAL, 0.0, random.Random(seed))
        if before.worker_id != target.worker_id:
            assert after.worker_id == before.worker_id


@untimed
@given(
    clusters(), st.integers(0, 20_000), st.integers(1, 9000), st.floats(0, 0.2), st.integers(1, 64), st.integers(0, 9)
)
def test_a_busier_batch_never_makes_its_worker_more_likely(
    cluster: tuple[WorkerView, tuple[WorkerView, ...]], hist: int, incr: int, itl_s: float, more: int, seed: int
) -> None:
    own, workers = cluster
    busier = replace(own, decode_batch=own.decode_batch + more, decode_context_tokens=own.decode_context_tokens + more)
    slower = replace(own, itl=Window(own.itl.mean_s + itl_s, own.itl.count + 1))
    task = round_of(hist, incr, Slo(1e6, 0.04))
    if route_by("predictive(spread=0)", task, own, *workers, seed=seed, model=REAL).route is Route.REMOTE:
        for other in (busier, slower):
            others = [other if candidate is own else candidate for candidate in workers]
            again = route_by("predictive(spread=0)", task, other, *others, seed=seed, model=REAL)
            assert again.route is Route.REMOTE


def fewest_late(queue: Sequence[PrefillTask]) -> int:
    """How many of a queue must be late, by trying every subset."""
    jobs = sorted((queued.slo.ttft_s, PLAIN.prefill_s(0, queued.incr_tokens, TP4)) for queued in queue)
    for size in range(len(jobs), 0, -1):
        for subset in combinations(jobs, size):
            ends_s = accumulate(time_s for _, time_s in subset)
            if all(end_s <= due_s for end_s, (due_s, _) in zip(ends_s, subset, strict=True)):
                return len(jobs) - size
    return len(jobs)


@untimed
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 400), st.sampled_from([0.2, 0.5, 1.0])), max_size=4), min_size=1, max_size=4
    ),
    st.integers(1, 400),
    st.sampled_from([0.2, 0.5, 1.0]),
)
def test_on_time_means_that_nobody_becomes_late_and_that_no_earlier_place_could_say_so(
    queues: list[list[tuple[int, float]]], incr: int, ttft_s: float
) -> None:
    task = round_of(0, incr, Slo(ttft_s, 0.04))
    workers = [ahead(f"p{number}", *rows) for number, rows in enumerate(queues)]
    decision = route(task, own_of(60), *workers)

    def loss(worker: WorkerView) -> int:
        alive = [queued for queued in worker.queue if not fewest_late([queued])]
        return fewest_late([*alive, task]) - fewest_late(alive)

    losses = {worker.worker_id: loss(worker) for worker in workers}
    if decision.reason == "on-time":
        assert losses[decision.worker_id] == 0
        earliest = decision.estimates[0].total_s
        for worker in workers:
            if losses[worker.worker_id] == 0:
                mine = route(task, own_of(60), worker).estimates[0].total_s
                assert mine >= earliest - 1e-12
    elif decision.reason == "fewest-late":
        assert min(losses.values()) == losses[decision.worker_id] == 1
    else:
        assert PLAIN.prefill_s(0, incr, TP4) > ttft_s


def test_a_prefill_worker_that_still_decodes_offers_what_its_batch_leaves_over() -> None:
    # Its step leaves so little of the target that it counts as a worker with the least share.
    turned = replace(prefill("turned", 30), decode_batch=30, decode_context_tokens=3000)
    busy = own_of(60)
    assert route(round_of(0, 100), busy, turned, prefill("idle", 60)).worker_id == "idle"
    alone = route(round_of(0, 100), busy, turned)
    rested = route(round_of(0, 100), busy, replace(turned, decode_batch=0))
    there = next(each for each in alone.estimates if each.route is Route.REMOTE)
    assert there.prefill_s == pytest.approx(rested.estimates[0].prefill_s / EXACT.least_share)


def test_a_busy_decode_worker_refuses_only_where_another_worker_is_free() -> None:
    """Just after a change of roles the only prefill worker still has its batch. Then leaving frees no worker."""
    turned = replace(prefill("turned", 300), decode_batch=30, decode_context_tokens=3000)
    busy = own_of(60)
    refused = route(round_of(0, 100), busy, prefill("free", 300))
    assert (refused.worker_id, len(refused.estimates)) == ("free", 1)
    kept = route(round_of(0, 100), busy, turned)
    assert (kept.route, kept.worker_id) == (Route.LOCAL, "d")
    assert kept.estimates[0].prefill_s == pytest.approx(0.11 / EXACT.least_share)
    assert route(round_of(0, 100), busy, turned, prefill("free", 300)).worker_id == "free"


# -- shared prefixes


def test_a_round_whose_prefix_is_held_is_not_hopeless() -> None:
    task = round_of(0, 2000)  # 2 s, of a target of 1 s
    workers = prefill("a"), prefill("b")
    alone = situations.route(EXACT, task, own_of(0), workers, PLAIN, 0.0, random.Random(0))
    assert alone.reason == "hopeless"
    decision = situations.route(EXACT, task, own_of(0), workers, PLAIN, 0.0, random.Random(0), {"b": 1600})
    assert (decision.worker_id, decision.reason) == ("b", "on-time")
    assert decision.estimates[0].prefill_s == pytest.approx(0.41)
