"""The report of a plan: it promises the same plan again, and compares figures, only where that is true."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from planner.plan_report import _curves, _end, _price, _sensitivity, axis_start


def figure(mean: float) -> dict[str, Any]:
    return {"mean": mean, "low": None, "high": None, "seeds": 1}


def varied(name: str, mean: float) -> dict[str, Any]:
    return {"name": name, "attainment": figure(mean), "sessions_in_time": 1.0, "carries": True}


@pytest.mark.parametrize(
    ("stopped", "is_decided", "words"),
    [
        (None, True, "gives the same plan again"),
        (None, False, "cut short by the time (--budget-s). Another run may therefore find another layout."),
        ("it was interrupted", False, "ended early, because it was interrupted. Another run may"),
        ("it was interrupted", True, "The search itself was complete, so another run finds the same layout"),
    ],
)
def test_the_same_plan_is_promised_only_of_a_search_that_ended(
    stopped: str | None, is_decided: bool, words: str
) -> None:
    text = _end({"stopped": stopped, "is_decided": is_decided})
    assert words in text
    assert ("same plan again" in text) == (stopped is None and is_decided)
    assert ("find another layout" in text) == (not is_decided)


def test_other_circumstances_of_a_part_are_compared_with_the_part_as_planned() -> None:
    best = {"attainment": figure(0.989), "meets_slo": True}
    result: dict[str, Any] = {
        "layouts": [best],
        "rate": 3.0,
        "scale": 1,
        "variations": [varied("20 % less load", 0.981)],
    }
    (section,) = _sensitivity(result)
    assert [row[:2] for row in section.rows] == [["as planned", "98.9%"], ["20 % less load", "98.1%"]]
    assert "of the cluster" not in " ".join(section.text)
    part = [varied("as planned", 0.979), *result["variations"]]
    (section,) = _sensitivity(result | {"scale": 2, "variations": part})
    assert [row[:2] for row in section.rows] == [["as planned", "97.9%"], ["20 % less load", "98.1%"]]
    assert "All lines of this table are simulations of 1/2 of the cluster" in " ".join(section.text)


@pytest.mark.parametrize(
    ("share", "start"),
    [(0.0, 0.0), (0.05, 0.0), (0.61, 0.6), (0.5, 0.4), (0.88, 0.85), (0.95, 0.94), (0.97, 0.96), (1.0, 0.99)],
)
def test_the_axis_of_shares_begins_at_a_round_one_below_the_lowest_point(share: float, start: float) -> None:
    assert axis_start(share) == pytest.approx(start)


def test_points_of_simulations_that_were_stopped_are_not_joined() -> None:
    def point(rate: float, share: float, is_most: bool) -> dict[str, Any]:
        return {"rate": rate, "sessions_in_time": share, "is_most": is_most, "carries": not is_most}

    layout = {"prefill": [], "decode": [{"tp": 1, "replicas": 1}], "gpus": 1}
    curve = [point(18.0, 1.0, False), point(20.0, 0.995, False), point(22.0, 0.96, True), point(24.0, 0.98, True)]
    axes = Figure().add_subplot()
    _curves(axes, {"layouts": [layout | {"curve": curve}], "rate": 20.0}, "sessions_in_time", 0.99, "share")
    joined = [list(np.asarray(line.get_xdata())) for line in axes.lines if line.get_linestyle() == "-"]
    assert [18.0, 20.0] in joined
    assert not any(len(xs) > 1 and {22.0, 24.0} & set(xs) for xs in joined)
    assert axes.get_ylim()[0] == pytest.approx(0.95)


def test_gpu_hours_name_their_rate_and_are_missing_where_nothing_is_carried() -> None:
    layout = {"prefill": [], "decode": [{"tp": 1, "replicas": 1}], "gpus": 1, "gpu_hours_per_1000_sessions": None}
    section = _price({"layouts": [layout], "rate": 2e6, "gpu_price": None, "next_step": None})
    assert section.rows == [["co-located 1xTP1", "1", "-"]]
    assert "for 2000000 sessions/s, or for the rate that the layout carries" in section.text[0]
