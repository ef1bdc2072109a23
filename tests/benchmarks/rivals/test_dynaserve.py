"""DynaServe: a prefill is split where its last token is earliest, and passes keep the ITL target."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.policies.base import Compute
from ampd.policies.passes import mixed_pass_s
from ampd.policies.registry import create
from ampd.types import Parallelism, Role, Route, RunningRound, WorkerView
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PLAIN, decode, prefill, round_of, route

# `PLAIN`: 10 ms a pass and 1 ms a token; a step of n sequences takes 5 + n ms. 100 tokens move in 1 ms.
TP = Parallelism()
PASSES = create("slicing", "dynaserve")


def mixed(name: str, *queue: int, batch: int = 0) -> WorkerView:
    return replace(decode(*queue, batch=batch, name=name), role=Role.MIXED)


def test_two_idle_workers_get_halves() -> None:
    decision = route("dynaserve", round_of(0, 640), mixed("own"), mixed("m"))
    assert (decision.route, decision.worker_id, decision.reason) == (Route.REMOTE, "m", "split")
    assert decision.split_tokens == 320


def test_loads_become_equal() -> None:
    # The own worker has 330 ms to do. With 480 of the tokens elsewhere both have 490 and 500 ms to do.
    decision = route("dynaserve", round_of(0, 640), mixed("own", 320), mixed("m"))
    assert decision.split_tokens == 480
    (estimate,) = decision.estimates
    assert (estimate.prefill_s, estimate.transfer_s) == (pytest.approx(0.49), pytest.approx(0.0048))
    assert estimate.total_s == pytest.approx(0.5048)


def test_a_worker_that_is_busier_than_the_own_one_gets_nothing() -> None:
    decision = route("dynaserve", round_of(0, 640), mixed("own"), mixed("m", 900))
    assert (decision.route, decision.worker_id, decision.reason) == (Route.LOCAL, "own", "whole")


def test_a_split_is_at_a_page_behind_the_history() -> None:
    decision = route("dynaserve", round_of(1000, 640), mixed("own", 320), mixed("m"))
    assert decision.split_tokens % 16 == 0
    assert 1000 < decision.split_tokens < 1640


def test_where_the_own_worker_is_busy_for_longer_all_of_it_goes() -> None:
    decision = route("dynaserve", round_of(0, 640), mixed("own", 2000), mixed("m"))
    assert (decision.route, decision.reason, decision.split_tokens) == (Route.REMOTE, "whole", 0)


def test_of_the_others_the_one_that_is_ready_first() -> None:
    decision = route("dynaserve", round_of(0, 640), mixed("own", 2000), mixed("a", 300), prefill("b", 200))
    assert decision.worker_id == "b"
    # Beside 30 sequences, whose steps take 35 of 40 ms, 60 ms of work take 480 ms.
    decision = route("dynaserve", round_of(0, 640), mixed("own", 2000), mixed("a", 50, batch=30), prefill("b", 200))
    assert decision.worker_id == "b"


def test_without_another_worker_it_is_local() -> None:
    assert route("dynaserve", round_of(0, 640), decode(500)).reason == "no-prefill-worker"


@given(st.integers(0, 5000), st.integers(1, 5000), st.lists(st.integers(1, 3000), max_size=3), st.integers(0, 50))
def test_a_split_is_within_the_increment(hist: int, incr: int, queue: list[int], batch: int) -> None:
    decision = route(
        "dynaserve", round_of(hist, incr), mixed("own", *queue, batch=batch), mixed("m"), prefill("p", 400)
    )
    assert decision.split_tokens == 0 or hist < decision.split_tokens < hist + incr
    assert (decision.split_tokens > 0) == (decision.reason == "split")
    assert (decision.route is Route.LOCAL) == (decision.worker_id == "own")


def test_a_pass_has_the_tokens_that_keep_the_target_with_the_step() -> None:
    batch = [RunningRound(5, 0.1, 0.04, 1000)] * 5
    assert situations.slice(PASSES, round_of(100, 400), batch, TP, PLAIN, 0.0) == Compute(25, decode_share=0.0)
    assert mixed_pass_s(PLAIN, [(100, 25)], 5, 5000, TP) == pytest.approx(0.04)
    assert situations.slice(PASSES, round_of(100, 20), batch, TP, PLAIN, 0.0) == Compute(20, decode_share=0.0)
    assert situations.slice(PASSES, round_of(100, 400), batch * 9, TP, PLAIN, 0.0) == Compute(16, decode_share=0.0)
    assert situations.slice(PASSES, round_of(100, 400), [], TP, PLAIN, 0.0) == Compute(400)
