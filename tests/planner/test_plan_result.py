"""The result of a plan: every rate that was tried is a point of the curve."""

import pytest

from planner.case_settings import PlanSettings
from planner.layout.candidate import Candidate
from planner.layout.layout import Layout
from planner.layout.trial import Trial
from planner.plan_command import _cost, _curve

FOUR = Layout((), ((4, 1),))


def simulated(met: float) -> Trial:
    return Trial(met, 1 - met, 0.0, 1.0, most=met)


def test_a_trial_that_was_stopped_says_what_it_attains_at_most() -> None:
    stopped = Trial(0.3, 0.5, 0.0, 0.0, is_whole=False, most=0.85)
    candidate = Candidate(FOUR, 0.8, {(3.0, 0): stopped, (2.0, 0): simulated(0.95), (2.0, 1): simulated(0.1)})
    assert _curve(candidate) == [
        {"rate": 2.0, "attainment": 0.95, "sessions_in_time": 1.0, "is_most": False, "carries": True},
        {"rate": 3.0, "attainment": 0.85, "sessions_in_time": 0.0, "is_most": True, "carries": False},
    ]


def test_all_seeds_decide_which_rates_of_the_curve_are_carried() -> None:
    candidate = Candidate(FOUR, 0.9, {(2.0, 0): simulated(0.95), (2.0, 1): simulated(0.1)}, (0, 1))
    assert [point["carries"] for point in _curve(candidate)] == [False]


@pytest.mark.parametrize(
    ("trials", "seeds", "hours"),
    [
        ({(10.0, 0): 0.95, (20.0, 0): 0.95}, (0,), 4 / 10 / 3.6),
        ({(10.0, 0): 0.95}, (), 4 / 10 / 3.6),
        ({(5.0, 0): 0.95, (10.0, 0): 0.5}, (0,), 4 / 5 / 3.6),
        ({(5.0, 0): 0.5, (10.0, 0): 0.5}, (0,), None),
        ({(10.0, 0): 0.5}, (), None),
    ],
)
def test_gpu_hours_are_of_sessions_that_the_layout_carries(
    trials: dict[tuple[float, int], float], seeds: tuple[int, ...], hours: float | None
) -> None:
    candidate = Candidate(FOUR, 0.9, {key: simulated(met) for key, met in trials.items()}, seeds)
    settings = PlanSettings(trace="tau-bench-airline", gpus=4, ttft=1.0, itl=0.1)
    found = _cost(candidate, 10.0, settings)["gpu_hours_per_1000_sessions"]
    assert found == (None if hours is None else pytest.approx(hours))
