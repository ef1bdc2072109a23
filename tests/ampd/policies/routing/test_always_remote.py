"""always-remote at random, and the two static rules: threshold, first round remote."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ampd.types import Route
from tests.ampd.policies.routing_lab import decode, prefill, round_of, route

IDLE, BUSY = prefill("idle"), prefill("busy", 9000, 9000)


def test_at_random_even_a_busy_worker_gets_its_share() -> None:
    decisions = [
        route("always-remote(choice=random)", round_of(0, 9), decode(), IDLE, BUSY, seed=seed) for seed in range(400)
    ]
    assert {(decision.route, decision.reason) for decision in decisions} == {(Route.REMOTE, "always-remote")}
    assert 150 < sum(decision.worker_id == "busy" for decision in decisions) < 250


def test_short_in_tokens_and_as_a_share_is_local() -> None:
    assert route("threshold", round_of(2000, 2047), decode(), IDLE).reason == "under-threshold"
    assert route("threshold", round_of(2000, 2048), decode(), IDLE).reason == "over-threshold"
    assert route("threshold", round_of(301, 699), decode(), IDLE).route is Route.LOCAL
    assert route("threshold", round_of(300, 700), decode(), IDLE).route is Route.REMOTE


def test_without_a_share_only_the_tokens_count() -> None:
    assert route("threshold(tokens=100, share=1.5)", round_of(0, 99), decode(), IDLE).route is Route.LOCAL
    assert route("threshold(tokens=100, share=1.5)", round_of(0, 100), decode(), IDLE).route is Route.REMOTE


def test_what_is_not_local_goes_where_the_least_work_is_queued() -> None:
    for policy, seed in product(("threshold", "first-remote", "always-remote"), range(9)):
        decision = route(policy, round_of(0, 5000), decode(), BUSY, IDLE, seed=seed)
        assert decision.worker_id == "idle"
        assert [estimate.queue_s for estimate in decision.estimates] == [18.02, 0.0]


lengths = st.integers(0, 50_000)


@given(
    lengths, st.integers(1, 20_000), st.integers(0, 9000), st.integers(0, 9000), st.floats(0, 1.2), st.floats(0, 0.3)
)
def test_a_higher_threshold_never_sends_a_local_round_away(
    hist: int, incr: int, tokens: int, more: int, share: float, larger: float
) -> None:
    task = round_of(hist, incr)
    lower = route(f"threshold(tokens={tokens}, share={share})", task, decode(), IDLE)
    higher = route(f"threshold(tokens={tokens + more}, share={share + larger})", task, decode(), IDLE)
    assert higher.route is Route.LOCAL or lower.route is Route.REMOTE


@given(lengths, st.integers(1, 20_000), st.integers(0, 64))
def test_only_a_round_without_history_leaves(hist: int, incr: int, batch: int) -> None:
    decision = route("first-remote", round_of(hist, incr), decode(batch=batch), IDLE)
    expected = (Route.LOCAL, "later-round") if hist else (Route.REMOTE, "first-round")
    assert (decision.route, decision.reason) == expected
