"""What tests of the planner share."""

import pytest

from planner.layout import plan, search, trial
from planner.layout.trial import Horizon


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations of a plan that take a tenth of the time, in processes that are forked later too."""
    short, long = Horizon(2.0, 0.0, 20, 60), Horizon(4.0, 0.0, 30, 120)
    monkeypatch.setattr(search, "SHORT", short)
    monkeypatch.setattr(search, "LONG", long)
    monkeypatch.setattr(plan, "ONCE", short)
    monkeypatch.setattr(trial, "_ROUND_TIMES", 1)
