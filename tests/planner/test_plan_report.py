"""The report of a plan: it promises the same plan again, and compares figures, only where that is true."""

from __future__ import annotations

from typing import Any

import pytest

from planner.plan_report import _end, _sensitivity


def figure(mean: float) -> dict[str, Any]:
    return {"mean": mean, "low": None, "high": None, "seeds": 1}


def varied(name: str, mean: float) -> dict[str, Any]:
    return {"name": name, "attainment": figure(mean), "sessions_in_time": 1.0, "carries": True}


@pytest.mark.parametrize(
    ("stopped", "is_decided", "words"),
    [
        (None, True, "gives the same plan again"),
        (None, False, "cut short by the time (--budget-s). Another run may therefore find another layout."),
        ("it was interrupted", True, "ended early, because it was interrupted. Another run may"),
    ],
)
def test_the_same_plan_is_promised_only_of_a_search_that_ended(
    stopped: str | None, is_decided: bool, words: str
) -> None:
    text = _end({"stopped": stopped, "is_decided": is_decided})
    assert words in text
    assert ("same plan again" in text) == (stopped is None and is_decided)


def test_other_circumstances_of_a_part_are_compared_with_the_part_as_planned() -> None:
    best = {"attainment": figure(0.989), "meets_slo": True}
    result = {"layouts": [best], "rate": 3.0, "scale": 1, "variations": [varied("20 % less load", 0.981)]}
    (section,) = _sensitivity(result)
    assert [row[:2] for row in section.rows] == [["as planned", "98.9%"], ["20 % less load", "98.1%"]]
    assert "of the cluster" not in " ".join(section.text)
    part = [varied("as planned", 0.979), *result["variations"]]
    (section,) = _sensitivity(result | {"scale": 2, "variations": part})
    assert [row[:2] for row in section.rows] == [["as planned", "97.9%"], ["20 % less load", "98.1%"]]
    assert "All lines of this table are simulations of 1/2 of the cluster" in " ".join(section.text)
