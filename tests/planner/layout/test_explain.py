"""What the explanation says: the figures of the trials, and never more than they show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.layout.appraisal import VARIATIONS, Appraised, Figure, Varied
from planner.layout.demand import Demand
from planner.layout.explain import headroom_of, p95_over_target, sentences, shortfall, slack_of, summary
from planner.layout.layout import Layout
from planner.layout.plan import GoodputPlan, NextStep
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
FINE, LATE, SLOW = Trial(0.97, 0.03, 0.0, 1.0), Trial(0.8, 0.15, 0.05, 1.0), Trial(0.8, 0.05, 0.15, 1.0)
STOPPED = Trial(0.4, 0.05, 0.0, 0.97, is_whole=False, most=0.96)
BEST = Appraised(
    Layout(((1, 1),), ((2, 1),)),
    Figure(0.97, 0.96, 0.98, 3),
    True,
    Figure(3.0, 2.8, 3.2, 3),
    [(2.0, FINE), (3.0, FINE), (3.2, LATE)],
    SIMULATED,
)
PLAN = GoodputPlan([BEST], 2.0, 0.9, Demand(2.0, 100_000.0, 5000.0), [], None, "", 40)


def explained(plan: GoodputPlan, left_out: dict[int, str] | None = None) -> str:
    return "\n".join(sentences(plan, CASE, left_out or {}))


def test_a_layout_that_carries_the_rate_is_named_with_its_figures() -> None:
    text = explained(PLAN)
    assert "prefill 1xTP1, decode 1xTP2 carries the most that was found on 4 GPUs" in text
    assert "it attains 97.0% (96.0% to 98.0%), and it carries up to 3 (2.8 to 3.2, 3 seeds) sessions/s" in text
    assert "No layout" not in text


def test_a_rate_that_none_carries_is_said_with_what_is_carried() -> None:
    poor = replace(BEST, carries_rate=False, attainment=Figure(0.5, None, None, 1), goodput=Figure(1.5, 1.4, 1.6, 3))
    text = explained(replace(PLAN, layouts=[poor]))
    assert "No layout of 4 GPUs was found to carry 2 sessions/s" in text
    assert "carries 75% of the rate" in text
    assert "Until the search ended" not in text
    early = explained(replace(PLAN, layouts=[poor], stopped="it was interrupted", is_decided=False))
    assert "Until the search ended, no layout of 4 GPUs was found to carry 2 sessions/s" in early
    assert headroom_of(poor, 2.0) == 0.75
    assert shortfall(0.0, 0.123) == shortfall(None, 0.123) == "attains 12.3% of the rounds"


def test_the_fewest_gpus_and_a_part_of_a_cluster_are_named() -> None:
    text = explained(replace(PLAN, has_fewest_gpus=True))
    assert "prefill 1xTP1, decode 1xTP2 has the fewest GPUs that were found to carry 2 sessions/s" in text
    seen = replace(BEST, carries_rate=False, simulated=SIMULATED | {"sessions": 300})
    text = explained(replace(PLAN, layouts=[seen], has_fewest_gpus=True, scale=8))
    assert "are too many to try layouts one by one" in text
    assert "on 1/8 of the GPUs at 1/8 of the rate, and each replica found stands for 8" in text
    assert "simulated with 3 seeds, with 300 sessions: prefill 1xTP1, decode 1xTP2 does not carry the" in text
    text = explained(replace(PLAN, layouts=[seen], scale=8, stopped="it was interrupted", is_checked=False))
    assert "The whole cluster was not simulated, because it was interrupted: the figures of prefill 1xTP1" in text
    assert "simulated with 3 seeds" not in text
    carrying = replace(seen, carries_rate=True)
    larger = replace(PLAN, layouts=[carrying], scale=8, copies=9.0, is_enlarged=True)
    assert "By its figures fewer would do, but they did not in simulations of the whole." in explained(larger)
    assert "less than its share" not in explained(larger)
    less = replace(PLAN, layouts=[carrying], scale=8, copies=9.0)
    assert "The part carries less than its share, so the whole has 9 times its replicas." in explained(less)
    assert "The other layouts" not in explained(less)
    assert "The other layouts were judged in the same way" in explained(replace(less, layouts=[carrying, carrying]))


def test_a_goodput_above_which_no_rate_failed_is_said_to_be_the_least() -> None:
    low = replace(BEST, goodput=Figure(3.0, None, None, 3), goodput_is_least=True, curve=[(2.0, FINE), (3.0, FINE)])
    text = explained(replace(PLAN, layouts=[low]))
    assert "it carries at least 3 sessions/s. Higher rates were not tried" in text
    assert "up to" not in text


def test_a_stopped_search_that_knows_that_none_carries_the_rate_says_what_is_carried() -> None:
    poor = replace(BEST, carries_rate=False, goodput=None, curve=[(6.0, LATE)])
    stopped = replace(PLAN, layouts=[poor], rate=6.0, stopped="the time was over", is_decided=False)
    known = explained(replace(stopped, none_carries=True, carried_rate=2.62))
    assert "No layout of 4 GPUs was found to carry 6 sessions/s" in known
    assert "The closest one, prefill 1xTP1, decode 1xTP2, carries 2.62 sessions/s in a short simulation." in known
    longer = replace(stopped, layouts=[replace(poor, curve=[(2.62, LATE)])], none_carries=True, carried_rate=2.62)
    assert "carries 2.62 sessions/s in a short simulation, but not in a longer one." in explained(longer)


def test_a_guess_that_fails_promises_no_fewer_gpus() -> None:
    guess = replace(PLAN, stopped="the time was over", is_decided=False, is_estimated=True)
    assert "More time may find fewer GPUs." in explained(guess)
    poor = replace(BEST, carries_rate=False)
    assert "More time may find a layout that carries it." in explained(replace(guess, layouts=[poor]))
    full = replace(poor, layout=Layout((), ((2, 2),)))
    text = explained(replace(guess, layouts=[full]))
    assert "More time may find a layout that carries it, but this one has all 4 GPUs already." in text


def test_layouts_that_may_carry_as_much_are_named() -> None:
    other, third = Layout((), ((4, 1),)), Layout((), ((2, 2),))
    tied = explained(replace(PLAN, tied=[other, third]))
    assert "co-located 1xTP4 and co-located 2xTP2 may carry as much" in tied
    assert "--budget-s" not in tied
    assert "3 other layouts may carry as much" in explained(replace(PLAN, tied=[other, third, other]))
    undecided = explained(replace(PLAN, tied=[other], is_decided=False))
    assert "So a longer search (--budget-s) may choose another one." in undecided


def test_without_a_rate_none_is_said_to_be_wanted() -> None:
    free = replace(CASE, rate=0.0, gpus=1)
    none = replace(BEST, carries_rate=False, goodput=Figure(0.0, 0.0, 0.0, 3), curve=[(0.002, LATE), (0.1, LATE)])
    text = "\n".join(sentences(replace(PLAN, layouts=[none], rate=0.002), free, {}))
    assert "No layout of 1 GPU was found to carry any rate that was tried, down to 0.002 sessions/s, with" in text
    assert "it carries no rate that was tried." in text


def test_refused_contexts_bind_where_they_are_most_of_the_misses() -> None:
    refusing = replace(BEST, curve=[(3.2, Trial(0.68, 0.03, 0.0, 1.0, refused=0.29))])
    assert slack_of(refusing, PLAN, CASE).binds == "context"
    text = explained(replace(PLAN, layouts=[refusing]))
    assert "What binds is the length of contexts" in text
    assert "3% of the rounds miss TTFT and 0% miss ITL, and 29% are refused or never come after a refusal" in text
    slower = replace(BEST, curve=[(3.2, Trial(0.6, 0.3, 0.0, 1.0, refused=0.1))])
    assert slack_of(slower, PLAN, CASE).binds == "prefill"


@pytest.mark.parametrize(
    ("trial", "binds"),
    [
        (LATE, "prefill"),
        (SLOW, "decode"),
        (Trial(0.95, 0.05, 0.0, 0.9), "sessions"),
        (STOPPED, "sessions"),
        (FINE, "unknown"),
    ],
)
def test_what_binds_is_read_from_the_first_rate_that_fails(trial: Trial, binds: str) -> None:
    appraised = replace(BEST, curve=[(2.0, FINE), (3.2, trial)])
    assert slack_of(appraised, PLAN, CASE).binds == binds
    assert ("at 3.2 sessions/s" in explained(replace(PLAN, layouts=[appraised]))) == (binds != "unknown")


def test_nothing_is_said_to_bind_where_only_the_planned_rate_was_simulated() -> None:
    alone = replace(BEST, curve=[(2.0, FINE)])
    assert slack_of(alone, PLAN, CASE).binds == "unknown"
    assert "What binds is not known, because no trial of a higher rate shows it." in explained(
        replace(PLAN, layouts=[alone])
    )
    assert slack_of(replace(BEST, curve=[(3.2, LATE)]), PLAN, CASE).binds == "prefill"
    most = replace(BEST, goodput_is_least=True, curve=[(2.0, FINE), (3.0, FINE)])
    assert slack_of(most, PLAN, CASE).binds == "nothing"


def test_a_rate_that_only_the_first_seed_fails_does_not_bind() -> None:
    unlucky = replace(BEST, curve=[(2.0, LATE), (3.0, SLOW), (3.2, LATE)])
    assert slack_of(unlucky, PLAN, CASE).binds == "prefill"
    assert "at 3.2 sessions/s" in explained(replace(PLAN, layouts=[unlucky]))


def test_kv_that_was_computed_again_is_said_as_the_simulation_shows_it() -> None:
    tight = replace(PLAN, demand=Demand(2.0, 1e9, 5000.0))
    assert "dropped" not in explained(tight)
    lost = replace(BEST, simulated=SIMULATED | {"lost_sessions": 3})
    assert "KV of waiting sessions was dropped 3 times, and computed again" in explained(replace(PLAN, layouts=[lost]))


def test_memory_binds_only_where_sessions_lost_their_kv() -> None:
    tight = replace(PLAN, demand=Demand(2.0, 1e6, 5000.0))
    assert slack_of(BEST, tight, CASE).binds == "prefill"
    lost = replace(BEST, simulated=SIMULATED | {"lost_sessions": 3})
    assert slack_of(lost, tight, CASE).binds == "kv_memory"
    assert slack_of(lost, PLAN, CASE).binds == "prefill"
    stores = replace(CASE, kv_store_tokens={1: 1000, 2: 1000})
    slack = slack_of(lost, PLAN, stores)
    assert (slack.binds, slack.host_memory) == ("host_memory", 0.01)


def test_every_degree_left_out_has_its_own_reason() -> None:
    text = explained(PLAN, {4: "too heavy", 8: "too heavy", 16: "too small"})
    assert "TP4, TP8 left out: too heavy." in text
    assert "TP16 left out: too small." in text


def test_refused_rounds_other_circumstances_and_an_early_end_are_said() -> None:
    assert "refused" not in explained(PLAN)
    assert "ended early" not in explained(PLAN)
    refused = replace(BEST, simulated=SIMULATED | {"errors": 113})
    assert "113 rounds were refused" in explained(replace(PLAN, layouts=[refused]))
    varied = replace(
        PLAN,
        variations=[
            Varied(VARIATIONS[0], Figure(0.99, None, None, 1), carries=True, in_time=1.0),
            Varied(VARIATIONS[1], Figure(0.95, 0.9, 1.0, 3), carries=False, in_time=0.96),
        ],
        stopped="it was interrupted",
        is_decided=False,
    )
    text = explained(varied)
    assert "Attainment at 2 sessions/s if the circumstances differ: 20 % less load 99.0%" in text, "not at the goodput"
    assert "20 % less load 99.0%; 20 % more load 95.0% (90.0% to 100.0%), not carried, because 4.0% of" in text
    assert "The search ended early, because it was interrupted." in explained(varied)
    decided = explained(replace(varied, is_decided=True))
    assert "ended early" not in decided
    assert "Some figures are missing, because it was interrupted." in decided


def test_the_gain_of_the_next_gpus_is_said_with_its_interval() -> None:
    def next_of(gain: Figure) -> str:
        return explained(replace(PLAN, next_step=NextStep(1, BEST, gain)))

    assert "The next 1 GPU would buy +0.4 sessions/s (+0.2 to +0.6), with" in next_of(Figure(0.4, 0.2, 0.6, 3))
    assert "which may be chance" in next_of(Figure(0.4, -0.2, 1.0, 3))
    assert "+123 sessions/s (+99 to +147)" in next_of(Figure(123.4, 98.6, 147.2, 3))
    nothing = next_of(Figure(-0.1, -0.2, 0.05, 3))
    assert "would buy nothing that the search shows: -0.1 sessions/s (-0.2 to +0.05), with" in nothing
    assert "would buy nothing that the search shows: less than it resolves (5%)" in next_of(Figure(0.0, None, None, 1))


def test_the_time_between_tokens_is_that_which_rounds_are_judged_by() -> None:
    assert slack_of(BEST, PLAN, CASE).decode == pytest.approx(CASE.slo.itl_s / 0.01), "not that of single gaps"
    assert p95_over_target(BEST, CASE) == pytest.approx(max(0.1 / CASE.slo.ttft_s, 0.01 / CASE.slo.itl_s))


def test_late_sessions_of_a_trial_that_stopped_are_counted_until_then() -> None:
    text = explained(replace(PLAN, layouts=[replace(BEST, curve=[(2.0, FINE), (3.2, STOPPED)])]))
    assert "and 3.0% of the sessions are too late already when the simulation is stopped" in text


def test_the_rate_of_a_part_is_said_where_a_rate_is_wanted() -> None:
    seen = replace(BEST, simulated=SIMULATED | {"sessions": 300})
    plan = replace(PLAN, layouts=[seen], scale=2)
    assert "on 1/2 of the GPUs at 1/2 of the rate" in explained(replace(plan, has_fewest_gpus=True))
    most = explained(plan)
    assert "4 GPUs are too many to try layouts one by one" in most
    assert "what carries most on 1/2 of the GPUs, and" in most


def test_a_higher_rate_of_fewer_seeds_below_the_first_layout_is_explained() -> None:
    def with_other(goodput: Figure) -> str:
        return explained(replace(PLAN, layouts=[BEST, replace(BEST, layout=Layout((), ((4, 1),)), goodput=goodput)]))

    assert "is shown with a higher rate, but of fewer seeds" in with_other(Figure(3.5, None, None, 1))
    assert "of fewer seeds" not in with_other(Figure(2.9, None, None, 1))


def test_large_rates_have_all_their_digits() -> None:
    many = replace(BEST, goodput=Figure(7360.2, 7011.4, 7700.9, 3), curve=[(7000.0, FINE), (8123.0, LATE)])
    assert "At 1000000 sessions/s it attains" in explained(replace(PLAN, layouts=[many], rate=1e6))
    text = explained(replace(PLAN, layouts=[many], rate=7000.0))
    assert "7360 (7011 to 7701, 3 seeds) sessions/s" in text
    assert "at 8123 sessions/s 15% of the rounds miss TTFT and 5% miss ITL" in text
    assert "e+" not in text


def test_an_interval_that_begins_below_the_planned_rate_is_explained() -> None:
    assert "The interval begins below" not in explained(PLAN)
    unsure = replace(BEST, goodput=Figure(2.1, 1.69, 2.61, 3))
    text = explained(replace(PLAN, layouts=[unsure]))
    assert "carries up to 2.1 (1.69 to 2.61, 3 seeds) sessions/s. The interval begins below 2, so these seeds" in text
    missed = replace(unsure, carries_rate=False)
    assert "The interval begins below" not in explained(replace(PLAN, layouts=[missed]))


def test_a_layout_beside_whose_parts_replicas_were_added_has_the_limit_of_the_parts() -> None:
    least = Figure(3.0, None, None, 3)
    filled = replace(BEST, goodput=least, goodput_is_least=True, curve=[(2.0, FINE)], unfilled=BEST)
    text = explained(replace(PLAN, layouts=[filled]))
    assert slack_of(filled, PLAN, CASE).binds == "prefill"
    assert "Without the replicas on the GPUs that remained it carries up to 3 (2.8 to 3.2, 3 seeds) sessions/s" in text
    assert "What binds without the replicas on the GPUs that remained is the time to the first token" in text
    assert "at 3.2 sessions/s 15% of the rounds miss TTFT" in text
    assert "Higher rates were not tried" not in text


def test_a_layout_that_no_trial_speaks_for_is_said_to_be_a_guess() -> None:
    poor = replace(BEST, carries_rate=False, attainment=Figure(0.067, None, None, 1), goodput=None, curve=[(2.0, LATE)])
    untried = replace(PLAN, layouts=[poor], stopped="the time was over", is_decided=False, is_untried=True, trials=1)
    text = explained(untried)
    assert "prefill 1xTP1, decode 1xTP2 is a guess of the integer programme. No simulation has shown a rate" in text
    assert "These are the best layouts after 1 simulation." in text
    part = explained(replace(untried, scale=4, is_checked=False))
    assert "a guess of the integer programme, which made it for 1/4 of the 4 GPUs. The whole cluster was not" in part
    lucky = explained(replace(untried, layouts=[replace(poor, carries_rate=True)]))
    assert "One simulation says that it carries 2 sessions/s, and none what it carries at most." in lucky


def test_the_summary_is_one_line_with_the_answer() -> None:
    assert summary(PLAN) == "3 GPUs: prefill 1xTP1, decode 1xTP2; carries 2 sessions/s."
    figure = Figure(0.95, 0.9, 1.0, 3)
    less, more = (Varied(VARIATIONS[each], figure, carries=not each, in_time=0.96) for each in (0, 1))
    assert summary(replace(PLAN, variations=[less, more])).endswith("carries 2 sessions/s, but not 20 % more load.")
    assert summary(replace(PLAN, variations=[more._replace(carries=True)])).endswith("and 20 % more load too.")
    poor = replace(BEST, carries_rate=False, goodput=Figure(1.5, 1.4, 1.6, 3))
    missed = replace(PLAN, layouts=[poor])
    less_than = "carries 1.5 sessions/s, less than the 2"
    assert summary(replace(missed, has_fewest_gpus=True)).endswith(f"{less_than} that were asked for.")
    assert summary(missed).endswith(f"{less_than} at which it was judged."), "the most goodput, without a rate"
    unknown = summary(replace(PLAN, layouts=[replace(poor, goodput=None)]))
    assert unknown.endswith("does not carry 2 sessions/s.")
