"""What tests of the planner share."""

import pytest

from planner.layout import appraisal, goodput_plan, goodput_search, trial, whole
from planner.layout.trial import Horizon


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations of a plan that take a tenth of the time, in processes that are forked later too."""
    short = Horizon(2.0, 0.0, 20, 60)
    for module in (goodput_search, goodput_plan):
        monkeypatch.setattr(module, "SHORT", short)
    monkeypatch.setattr(trial, "_ROUND_TIMES", 1)
    monkeypatch.setattr(whole, "ONCE", short)
    long = Horizon(4.0, 0.0, 30, 120)
    for module in (appraisal, trial):
        monkeypatch.setattr(module, "LONG", long)
    monkeypatch.setattr(appraisal, "SHORT", short)
    monkeypatch.setitem(goodput_search._CONFIRMS, "horizon", long)
