"""Costs that trials have corrected: kinds that carried less than predicted become dearer, others stay."""

from __future__ import annotations

import pytest

from planner.layout.costs import Costs
from planner.layout.feedback import corrected, surprising
from planner.layout.fluid import most_rate
from planner.layout.layout import Layout

COSTS = Costs((1, 2), {1: 1.0, 2: 0.55}, {1: 0.5, 2: 0.28}, [])
SMALL, LARGE = Layout((), ((1, 4),)), Layout((), ((2, 2),))


def test_costs_of_the_kinds_that_were_tried_follow_the_simulated_rates() -> None:
    found = corrected(COSTS, {LARGE: COSTS.bound(LARGE) / 2})
    assert found.prefill_s == pytest.approx({1: 1.0, 2: 1.1})
    assert found.decode_s == pytest.approx({1: 0.5, 2: 0.56})
    assert found.bound(LARGE) == pytest.approx(COSTS.bound(LARGE) / 2)
    assert corrected(COSTS, {}) == COSTS
    assert corrected(COSTS, {LARGE: 0.0}) == COSTS


def test_prefill_and_decode_replicas_are_corrected_apart() -> None:
    split = Layout(((1, 2),), ((2, 1),))
    found = corrected(COSTS, {split: 3 * COSTS.bound(split)})
    assert found.prefill_s == pytest.approx({1: 1 / 3, 2: 0.55})
    assert found.decode_s == pytest.approx({1: 0.5, 2: 0.28 / 3})
    # Half of the GPUs of the second layout are of this kind, and all of the first.
    both = corrected(COSTS, {SMALL: 4 * COSTS.bound(SMALL), split: COSTS.bound(split)})
    assert both.prefill_s[1] == pytest.approx(1 / 4 ** (1 / 1.5))


def test_the_programme_proposes_another_layout_when_its_first_one_disappoints() -> None:
    first = most_rate(COSTS, 4)
    assert first is not None
    second = most_rate(corrected(COSTS, {first[0]: 0.3 * first[1]}), 4)
    assert second is not None
    assert second[0] != first[0]


def test_trials_of_one_rate_tell_something_only_where_they_contradict_the_bound() -> None:
    low, high = sorted([SMALL, LARGE], key=COSTS.bound)
    between = (COSTS.bound(low) + COSTS.bound(high)) / 2
    assert surprising(COSTS, between, [high], [low]) == {}
    assert surprising(COSTS, between, [low], [high]) == {low: between, high: between}
    found = corrected(COSTS, surprising(COSTS, between, [low], []))
    assert found.bound(low) == pytest.approx(between)
    assert found.bound(high) == pytest.approx(COSTS.bound(high))
