"""A layout with its trials: all figures are read from the same trials, so they cannot contradict each other."""

from __future__ import annotations

import pytest

from planner.layout.candidate import Candidate, Figure, carried_on_average
from planner.layout.layout import Layout
from planner.layout.trial import Trial

FINE, LATE = Trial(0.95, 0.05, 0.0, 1.0), Trial(0.8, 0.2, 0.0, 1.0)
TP1 = Layout((), ((1, 1),))


def candidate(most: dict[int, float], rates: tuple[float, ...] = (1.0, 1.1, 1.2)) -> Candidate:
    """With trials of each seed at each rate. `most`: what the seeds carry."""
    trials = {(rate, seed): FINE if rate <= carried else LATE for rate in rates for seed, carried in most.items()}
    return Candidate(TP1, 0.9, trials, tuple(most))


def test_the_goodput_is_that_of_all_seeds_together_and_the_interval_that_of_single_ones() -> None:
    known = candidate({0: 1.0, 1: 1.1, 2: 1.2})
    # At 1.1 the mean is (0.8 + 0.95 + 0.95) / 3, which is enough.
    assert known.most == 1.1
    figure = known.figure()
    assert figure is not None
    assert figure.mean == 1.1
    assert figure.low is not None
    assert figure.high is not None
    assert figure.high - 1.1 == pytest.approx(1.1 - figure.low) == pytest.approx(0.248, abs=0.001)
    assert figure.seeds == 3
    assert Candidate(TP1, 0.9).figure() is None


def test_a_rate_that_held_out_seeds_refute_is_not_carried() -> None:
    known = candidate({0: 1.2, 1: 1.2, 2: 1.2})
    assert known.carries(1.1)
    known.refused = 1.1
    assert not known.carries(1.1)
    assert known.carries(1.0)
    assert known.most == 1.0


def test_without_a_goodput_the_trials_at_the_rate_decide() -> None:
    known = Candidate(TP1, 0.9, {(1.0, 0): FINE, (1.0, 1): LATE})
    assert not known.carries(1.0)
    known.trials[1.0, 2] = FINE
    assert known.carries(1.0)
    assert not known.carries(2.0), "nothing is known there"
    short = Candidate(TP1, 0.9, first=FINE)
    assert short.carries(1.0)


def test_copies_of_a_part_carry_as_many_times_its_rates() -> None:
    part = candidate({0: 1.1, 1: 1.1, 2: 1.1})
    whole = part.times(Layout((), ((1, 3),)), 3)
    assert whole.most == 3 * 1.1
    assert whole.layout.gpus == 3
    assert whole.carries(3.0)
    part.refused = 1.1
    assert part.times(whole.layout, 3).most == 3 * 1.0
    whole.whole = LATE
    assert not whole.carries(3.0), "the simulation of the whole decides too"
    assert whole.attainment(3.0) == Figure(0.8, None, None, 1)


def test_intervals_stay_within_what_is_possible() -> None:
    assert Figure.of([0.99, 1.0, 0.9], most=1.0).high == 1.0
    assert Figure.of([0.0, 0.1, 0.0]).low == 0.0
    assert Figure.of([0.5]) == Figure(0.5, None, None, 1)


def test_a_trial_that_was_stopped_is_not_carried() -> None:
    stopped = Trial(0.95, 0.0, 0.0, 1.0, is_whole=False)
    assert not carried_on_average([FINE, FINE, stopped], 0.9)
    assert not carried_on_average([], 0.9)
