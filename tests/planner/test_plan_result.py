"""The result of a plan: every rate that was tried is a point of the curve."""

from planner.layout.appraisal import Appraised, Figure
from planner.layout.layout import Layout
from planner.layout.trial import Trial
from planner.plan_result import _point


def test_a_trial_that_was_stopped_says_what_it_attains_at_most() -> None:
    whole, stopped = Trial(0.95, 0.05, 0.0, 1.0, most=0.95), Trial(0.3, 0.5, 0.0, 0.0, is_whole=False, most=0.85)
    appraised = Appraised(Layout((), ((1, 1),)), Figure.of([0.95]), True, None, [], {})
    assert _point(appraised, 2.0, whole, 0.9) == {"rate": 2.0, "attainment": 0.95, "is_most": False, "carries": True}
    assert _point(appraised, 3.0, stopped, 0.8) == {"rate": 3.0, "attainment": 0.85, "is_most": True, "carries": False}
