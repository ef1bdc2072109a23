"""What the explanation says: the figures of the trials, and never more than they show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.layout.candidate import CHOOSING, Candidate
from planner.layout.explain import answer, headroom_of, p95_over_target, sentences, shortfall, slack_of
from planner.layout.fluid import Demand
from planner.layout.layout import Layout
from planner.layout.plan import Plan
from planner.layout.trial import Trial

from .lab import CASE

SIMULATED: dict[str, Any] = {
    "attainment": {"rounds": 0.97},
    "errors": 0,
    "lost_sessions": 0,
    "ttft_s": {"p95": 0.1},
    "itl_s": {"p95": 0.03},
    "mean_itl_s": {"p95": 0.01},
}
FINE, LATE, SLOW = (
    Trial(0.97, 0.03, 0.0, 1.0, True, SIMULATED),
    Trial(0.8, 0.15, 0.05, 1.0),
    Trial(0.8, 0.05, 0.15, 1.0),
)
STOPPED = Trial(0.4, 0.05, 0.0, 0.97, is_whole=False, most=0.96)
DEMAND = Demand(2.0, 100_000.0, 5000.0)
SPLIT = Layout(((1, 1),), ((2, 1),))


def best(*points: tuple[float, Trial]) -> Candidate:
    """A layout with these trials of three seeds; its goodput is known."""
    return Candidate(SPLIT, 0.9, {(rate, seed): trial for rate, trial in points for seed in CHOOSING}, CHOOSING)


def plan(candidate: Candidate, **changes: Any) -> Plan:
    return replace(Plan([candidate], 2.0, has_fewest_gpus=False, trials=40), **changes)


BEST = best((2.0, FINE), (3.0, FINE), (3.2, LATE))
UNKNOWN = Candidate(SPLIT, 0.9, first=replace(LATE, result=SIMULATED))
"""A layout with a short trial, which failed."""


def binds(candidate: Candidate) -> str:
    return slack_of(candidate, plan(candidate), CASE, DEMAND).binds


def explained(made: Plan, left_out: dict[int, str] | None = None) -> str:
    slack = slack_of(made.layouts[0], made, CASE, DEMAND) if made.layouts else None
    return "\n".join(sentences(made, CASE, left_out or {}, slack))


def test_a_layout_that_carries_the_rate_is_named_with_its_figures() -> None:
    text = explained(plan(BEST))
    assert "prefill 1xTP1, decode 1xTP2 carries the most that was found on 4 GPUs" in text
    assert "it attains 97.0% (97.0% to 97.0%), and it carries up to 3 (3 to 3, 3 seeds) sessions/s." in text
    assert "No layout" not in text
    assert "What binds is the time to the first token (prefill capacity): at 3.2 sessions/s 15% of the rounds" in text
    assert "By an estimate the layout has" in text
    fewest = explained(plan(BEST, has_fewest_gpus=True))
    assert "prefill 1xTP1, decode 1xTP2 has the fewest GPUs that were found to carry 2 sessions/s" in fewest


def test_a_rate_that_none_carries_is_said_with_what_is_carried() -> None:
    poor = best((1.5, FINE), (2.0, replace(LATE, result=SIMULATED)))
    text = explained(plan(poor))
    assert "No layout of 4 GPUs was found to carry 2 sessions/s" in text
    assert "carries 75% of the rate, and attains 80.0% of the rounds" in text
    assert headroom_of(poor, 2.0) == 0.75
    assert shortfall(0.0, 0.123) == shortfall(None, 0.123) == "attains 12.3% of the rounds"


def test_a_plan_without_an_answer_is_one_sentence() -> None:
    none = Plan([], 0.0, has_fewest_gpus=False, trials=40)
    assert explained(none) == answer(none, CASE)
    assert "No layout of 4 GPUs carries any rate that was tried" in answer(none, CASE)
    assert "0.0%" not in explained(none)


def test_a_search_that_ended_early_says_so_in_one_sentence() -> None:
    text = explained(plan(UNKNOWN, stopped="it was interrupted"))
    assert text.count("The search ended early, because it was interrupted") == 1
    assert "What it carries at most is not known." in text
    assert "What binds is not known" in text
    lucky = explained(plan(replace(UNKNOWN, first=FINE)))
    assert "prefill 1xTP1, decode 1xTP2 carries 2 sessions/s in one simulation" in lucky


def test_a_part_of_a_cluster_is_named_in_one_sentence() -> None:
    text = explained(plan(BEST, scale=8, has_fewest_gpus=True))
    assert "It is 8 times the best layout of 1/8 of the cluster, and the whole was not simulated." in text
    text = explained(plan(replace(BEST, whole=FINE), scale=8, has_fewest_gpus=True))
    assert "It is 8 times the best layout of 1/8 of the cluster, and the whole was simulated once." in text
    assert "it attains 97.0%, and it carries up to 3 " in text


def test_refused_contexts_bind_where_they_are_most_of_the_misses() -> None:
    refusing = best((2.0, FINE), (3.2, Trial(0.68, 0.03, 0.0, 1.0, refused=0.29)))
    assert binds(refusing) == "context"
    text = explained(plan(refusing))
    assert "What binds is the length of contexts" in text
    assert "3% of the rounds miss TTFT and 0% miss ITL, and 29% are refused or never come after a refusal" in text
    assert binds(best((2.0, FINE), (3.2, Trial(0.6, 0.3, 0.0, 1.0, refused=0.1)))) == "prefill"


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        (LATE, "prefill"),
        (SLOW, "decode"),
        (Trial(0.95, 0.05, 0.0, 0.9), "sessions"),
        (STOPPED, "sessions"),
        (FINE, "unknown"),
    ],
)
def test_what_binds_is_read_from_the_first_rate_that_fails(trial: Trial, expected: str) -> None:
    known = best((2.0, FINE), (3.2, trial))
    assert binds(known) == expected
    assert ("at 3.2 sessions/s" in explained(plan(known))) == (expected != "unknown")


def test_a_rate_that_only_the_first_seed_fails_does_not_bind() -> None:
    unlucky = best((2.0, FINE), (3.0, FINE), (3.2, LATE))
    unlucky.trials[3.0, 0] = replace(SLOW, met=0.89)
    assert unlucky.most == 3.0
    assert binds(unlucky) == "prefill"


def test_a_memory_that_is_too_small_binds_where_sessions_lost_their_kv() -> None:
    much = Demand(2.0, 1e9, 5000.0)
    losing = replace(FINE, result=SIMULATED | {"lost_sessions": 3})
    lost = best((2.0, losing), (3.2, LATE))
    assert slack_of(lost, plan(lost), CASE, much).binds == "kv_memory"
    assert slack_of(BEST, plan(BEST), CASE, much).binds == "prefill"
    assert "KV of waiting sessions was dropped 3 times, and computed again" in explained(plan(lost))


def test_with_a_store_running_rounds_need_kv_memory_and_resident_sessions_host_memory() -> None:
    stores = replace(CASE, kv_store_tokens={1: 50_000, 2: 90_000})
    slack = slack_of(BEST, plan(BEST), stores, DEMAND)
    assert slack.kv_memory == pytest.approx(450_000 / 5000)
    assert slack.host_memory == pytest.approx(0.9)
    text = "\n".join(sentences(plan(BEST), stores, {}, slack))
    assert "90.0 times the KV memory and 0.9 times the host memory" in text


def test_degrees_that_are_left_out_are_named_with_the_reason() -> None:
    text = explained(plan(BEST), {1: "too small", 2: "too small", 8: "unknown"})
    assert "TP1, TP2 left out: too small.\nTP8 left out: unknown." in text


def test_more_load_is_said_to_be_carried_or_not() -> None:
    more = best((2.0, FINE), (2.4, FINE), (3.2, LATE))
    assert "20 % more load is carried too: 97.0% (97.0% to 97.0%) of the rounds are attained then." in explained(
        plan(more)
    )
    less = best((2.0, FINE), (2.4, LATE))
    assert "20 % more load is not carried: 80.0%" in explained(plan(less))
    assert "20 % more load" not in explained(plan(BEST)), "it was not simulated"


def test_the_time_between_tokens_is_that_which_rounds_are_judged_by() -> None:
    slack = slack_of(BEST, plan(BEST), CASE, DEMAND)
    assert slack.decode == pytest.approx(CASE.slo.itl_s / 0.01), "not that of single gaps"
    assert p95_over_target(BEST, 2.0, CASE) == pytest.approx(max(0.1 / CASE.slo.ttft_s, 0.01 / CASE.slo.itl_s))


def test_large_rates_have_all_their_digits() -> None:
    many = best((1e6, FINE), (7360.2, FINE), (8123.0, LATE))
    text = explained(plan(best((7000.0, FINE), (7360.2, FINE), (8123.0, LATE)), rate=7000.0))
    assert "7360 (7360 to 7360, 3 seeds) sessions/s" in text
    assert "at 8123 sessions/s 15% of the rounds miss TTFT and 5% miss ITL" in text
    assert "e+" not in text
    assert "At 1000000 sessions/s it attains" in explained(plan(many, rate=1e6))


def test_an_interval_that_begins_below_the_planned_rate_is_explained() -> None:
    reaches = "The interval reaches below 2: with other sessions the rate may fail."
    assert reaches not in explained(plan(BEST))
    unsure = best((1.8, FINE), (2.0, FINE), (2.2, FINE), (2.4, LATE))
    for rate in (2.0, 2.2):
        unsure.trials[rate, 0] = replace(LATE, result=SIMULATED)
    assert unsure.most == 2.2
    assert reaches in explained(plan(unsure))
