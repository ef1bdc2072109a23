"""Made-up trials, and plans of a part of a large cluster, whose goodputs a test gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.layout.appraisal import VARIATIONS, Appraised, Figure, Varied
from planner.layout.demand import Demand
from planner.layout.layout import Layout
from planner.layout.plan import GoodputPlan
from planner.layout.trial import Trial

from .lab import CASE

PART_RATE = 30.0
"""Of the part, in sessions per second."""

SEEN: dict[str, Any] = {
    "rounds": 20,
    "sessions": 9,
    "errors": 0,
    "lost_sessions": 0,
    "ttft_s": {"p95": 0.1},
    "mean_itl_s": {"p95": 0.01},
}
"""What sentences read of a simulation."""

Goodputs = Mapping[Layout, float | None]
"""Of a part's layouts, the best one first. None: it is not known yet."""


def simulated(met: float) -> Trial:
    """A whole simulation in which all sessions end in time; `met`: the share of the rounds within both targets."""
    return Trial(met, 1 - met, 0.0, 1.0, True, dict(SEEN), most=met)


def plan_of_part(goodputs: Goodputs, *, uses_all: bool = False, stopped: str = "") -> GoodputPlan:
    """The plan of a part."""
    return GoodputPlan(
        [_appraised(layout, goodput) for layout, goodput in goodputs.items()],
        PART_RATE,
        CASE.attainment,
        Demand(1.0, 1.0, 1.0),
        [Varied(VARIATIONS[0], Figure(0.9, None, None, 1), True, 1.0)],
        None,
        stopped,
        10,
        has_fewest_gpus=not uses_all,
        is_decided=None not in goodputs.values(),
    )


def _appraised(layout: Layout, goodput: float | None) -> Appraised:
    figure = None if goodput is None else Figure(goodput, goodput, goodput, 3)
    curve = [(PART_RATE, Trial(0.95, 0.05, 0.0, 1.0, most=0.95))]
    carries = goodput is None or goodput >= PART_RATE
    return Appraised(layout, Figure(0.95, None, None, 1), carries, figure, curve, dict(SEEN))
