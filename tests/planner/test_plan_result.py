"""The result of a plan: every rate that was tried is a point of the curve."""

import pytest

from planner.layout.appraisal import Appraised, Figure
from planner.layout.demand import Demand
from planner.layout.layout import Layout
from planner.layout.plan import GoodputPlan
from planner.layout.trial import Trial
from planner.plan_result import _cost, _point
from planner.plan_settings import PlanSettings


def test_a_trial_that_was_stopped_says_what_it_attains_at_most() -> None:
    whole, stopped = Trial(0.95, 0.05, 0.0, 1.0, most=0.95), Trial(0.3, 0.5, 0.0, 0.0, is_whole=False, most=0.85)
    appraised = Appraised(Layout((), ((1, 1),)), Figure.of([0.95]), True, None, [], {})
    assert _point(appraised, 2.0, whole, 0.9) == {
        "rate": 2.0,
        "attainment": 0.95,
        "sessions_in_time": 1.0,
        "is_most": False,
        "carries": True,
    }
    assert _point(appraised, 3.0, stopped, 0.8) == {
        "rate": 3.0,
        "attainment": 0.85,
        "sessions_in_time": 0.0,
        "is_most": True,
        "carries": False,
    }


@pytest.mark.parametrize(
    ("carries", "goodput", "hours"),
    [
        (True, 20.0, 4 / 10 / 3.6),
        (True, None, 4 / 10 / 3.6),
        (False, 5.0, 4 / 5 / 3.6),
        (False, 0.0, None),
        (False, None, None),
    ],
)
@pytest.mark.parametrize("is_least", [False, True])
def test_gpu_hours_are_of_sessions_that_the_layout_carries(
    carries: bool, goodput: float | None, hours: float | None, is_least: bool
) -> None:
    figure = None if goodput is None else Figure.of([goodput])
    appraised = Appraised(Layout((), ((4, 1),)), Figure.of([0.95]), carries, figure, [], {}, is_least)
    assert hours_of(appraised) == (None if hours is None else pytest.approx(hours))


def test_gpu_hours_of_a_layout_that_carries_the_rate_are_not_of_a_lower_bound_below_it() -> None:
    appraised = Appraised(Layout((), ((4, 1),)), Figure.of([0.95]), True, Figure.of([5.0]), [], {}, True)
    assert hours_of(appraised) == pytest.approx(4 / 10 / 3.6)


def hours_of(appraised: Appraised) -> float | None:
    """Of 1000 sessions, at 10 sessions/s."""
    plan = GoodputPlan([appraised], 10.0, 0.9, Demand(10.0, 1e5, 5e3), [], None, "", 1)
    settings = PlanSettings(trace="tau-bench-airline", gpus=4, ttft=1.0, itl=0.1)
    hours: float | None = _cost(appraised, plan, settings)["gpu_hours_per_1000_sessions"]
    return hours
