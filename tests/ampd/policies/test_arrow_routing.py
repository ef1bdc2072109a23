"""Arrow's prefill dispatch: settled prefill workers first, those that still decode if the target needs them."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ampd.types import Role, Route
from tests.ampd.policies.routing_lab import SLO, decode, prefill, round_of, route

TASK = round_of(0, 490)
"""0.5049 s on an idle prefill worker; the target is 1 s."""


def choice(*workers: object, now_s: float = 0.0) -> tuple[str, str]:
    decision = route("arrow", TASK, decode(), *workers, now_s=now_s)  # type: ignore[arg-type]
    assert decision.route is Route.REMOTE
    assert len(decision.estimates) == len(workers)
    return decision.worker_id, decision.reason


def test_a_settled_worker_that_meets_the_target_comes_before_a_faster_one_that_still_decodes() -> None:
    assert choice(prefill("p", 480), prefill("slower", 484), prefill("d2p", decode_batch=3)) == ("p", "prefill")


def test_one_that_still_decodes_is_used_when_the_target_needs_it() -> None:
    changed = (prefill("busy", 300, decode_batch=3), prefill("d2p", 200, decode_batch=3))
    assert choice(prefill("p", 490), *changed) == ("d2p", "decode-to-prefill")


def test_when_nobody_meets_the_target_the_settled_worker_with_the_least_delay_takes_it() -> None:
    changed = prefill("d2p", 600, decode_batch=3)
    assert choice(prefill("p", 900), prefill("q", 800), changed) == ("q", "least-delay")
    assert choice(changed, prefill("worse", 700, decode_batch=1)) == ("d2p", "least-delay")


def test_time_that_has_passed_since_arrival_counts() -> None:
    workers = (prefill("p", 400), prefill("d2p", 100, decode_batch=3))
    assert choice(*workers) == ("p", "prefill")
    assert choice(*workers, now_s=0.1) == ("d2p", "decode-to-prefill")


def test_with_mixed_workers_only_a_round_stays_local() -> None:
    mixed = replace(prefill("m", 10), role=Role.MIXED)
    assert route("arrow", TASK, decode(), mixed).route is Route.LOCAL


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3)), min_size=1, max_size=6),
    st.integers(0, 5000),
    st.integers(1, 3000),
)
def test_the_target_is_met_whenever_some_worker_meets_it(loads: list[tuple[int, int]], hist: int, incr: int) -> None:
    workers = [prefill(f"p{i}", queue, decode_batch=batch) for i, (queue, batch) in enumerate(loads)]
    decision = route("arrow", round_of(hist, incr), decode(), *workers)
    chosen = next(estimate for estimate in decision.estimates if estimate.worker_id == decision.worker_id)
    within = [estimate for estimate in decision.estimates if estimate.total_s <= SLO.ttft_s]
    assert (chosen.total_s <= SLO.ttft_s) == bool(within)
    same_pool = [
        estimate.total_s
        for estimate, worker in zip(decision.estimates, workers, strict=True)
        if bool(worker.decode_batch) == bool(workers[int(chosen.worker_id[1:])].decode_batch)
    ]
    assert chosen.total_s == min(same_pool)
