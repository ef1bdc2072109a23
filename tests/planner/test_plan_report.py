"""The report of a plan: it promises the same plan again only where that is true."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from planner.reports import _curves, _end, _price, axis_start


def test_the_same_plan_is_promised_only_of_a_search_that_ended() -> None:
    assert "gives the same plan again" in _end({"stopped": None})
    early = _end({"stopped": "it was interrupted"})
    assert "ended early, because it was interrupted, so another run may find another layout" in early
    assert "same plan again" not in early


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
