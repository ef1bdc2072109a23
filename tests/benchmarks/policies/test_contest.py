"""One simulation of the contest: the time of sessions, shares that starving cannot raise, and wrong beliefs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampd.perf.presets import analytic_model
from ampd.types import Parallelism
from benchmarks.policies.contest import Condition, measure, run
from benchmarks.policies.contestants import ALWAYS_REMOTE, OURS

from .lab import TINY

ALWAYS_LOCAL = replace(ALWAYS_REMOTE, routing="always-local")


def test_starving_is_not_sustained() -> None:
    sessions, done = run(TINY, ALWAYS_REMOTE, 1.0, 0)
    fine = measure(TINY, sessions, done)
    assert fine.in_time == 1.0
    assert fine.sustained_rounds == fine.rounds > 0.9
    victims = {session.session_id for session in sessions[:2]}
    late = [record for record in done.rounds if record.session_id in victims and record.index == 0]
    assert len(late) == 2
    for each in late:
        assert each.e2e_s is not None
        each.e2e_s += 1_000.0
    starved = measure(TINY, sessions, done)
    assert starved.rounds == fine.rounds
    assert starved.in_time == pytest.approx(1 - 2 / len(sessions))
    assert starved.sustained_rounds == 0.0


def test_what_is_out_of_reach_counts_for_nobody() -> None:
    model, theta = TINY.performance_model(), Parallelism(1)
    plain_sessions, plain_done = run(TINY, ALWAYS_LOCAL, 1.0, 0)
    longest_s = sorted(
        max(model.prefill_s(hist, incr, theta) for hist, incr in session.computed_tokens())
        for session in plain_sessions
    )
    tight = replace(TINY, ttft_s=longest_s[len(longest_s) // 2])
    within = sum(time_s <= tight.ttft_s for time_s in longest_s) / len(longest_s)
    assert 0.4 < within < 0.6
    plain, point = plain_done.attainment(tight.slo), measure(tight, plain_sessions, plain_done)
    assert point.rounds > plain.rounds
    assert point.sessions == pytest.approx(plain.sessions / within), "only sessions within reach attain"


@pytest.mark.slow
def test_beliefs_are_wrong_only_for_the_policies() -> None:
    model, theta = analytic_model("llama-3.1-8b", "h100"), Parallelism(1)
    assert Condition("x", belief="1").believed(model, 0) is model
    slow = Condition("x", belief="1.3").believed(model, 0)
    assert slow.prefill_s(0, 500, theta) == pytest.approx(1.3 * model.prefill_s(0, 500, theta))
    random_ones = [Condition("x", belief="random").believed(model, seed) for seed in (1, 1, 2)]
    factors = [each.decode_step_s(1, 9, theta) / model.decode_step_s(1, 9, theta) for each in random_ones]
    assert factors[0] == factors[1] != factors[2]
    assert all(0.7 <= factor <= 1.3 for factor in factors)
    kept = Condition("x", belief="kept-1.3")
    assert kept.believed(model, 0).prefill_s(0, 100, theta) == slow.prefill_s(0, 100, theta)
    assert (kept.options(0).corrects_times, Condition("x", belief="1.3").options(0).corrects_times) == (False, True)
    # Without a choice to make, a wrong belief changes nothing.
    for blind in (ALWAYS_REMOTE, ALWAYS_LOCAL):
        true, wrong = (run(TINY, blind, 8.0, 0, Condition("x", belief=factor))[1] for factor in ("1", "0.1"))
        assert true.rounds == wrong.rounds
    seen, misled = (run(TINY, OURS, 12.0, 0, Condition("x", belief=factor))[1] for factor in ("1", "0.3"))
    assert [record.route for record in seen.rounds] != [record.route for record in misled.rounds]
