"""The report of a plan: it promises the same plan again only where that is true."""

from __future__ import annotations

from typing import Any

from planner.reports import _curves, _end, _pareto


def _layout(*curve: dict[str, Any]) -> dict[str, Any]:
    return {"prefill": [], "decode": [{"tp": 1, "replicas": 1}], "gpus": 1, "curve": curve}


def _tried(layout: str, rate: float, per_user: float, per_gpu: float, carries: bool = True) -> dict[str, Any]:
    speeds = {"tokens_per_s_per_user": per_user, "tokens_per_s_per_gpu": per_gpu}
    return {"layout": layout, "rate": rate, "carries": carries} | speeds


def test_the_same_plan_is_promised_only_of_a_search_that_ended() -> None:
    assert "gives the same plan again" in _end({"stopped": None})
    early = _end({"stopped": "it was interrupted"})
    assert "ended early, because it was interrupted, so another run may find another layout" in early
    assert "same plan again" not in early


def test_points_of_simulations_that_were_stopped_are_not_joined() -> None:
    def point(rate: float, share: float, is_most: bool) -> dict[str, Any]:
        return {"rate": rate, "attainment": 1, "sessions_in_time": share, "is_most": is_most, "carries": not is_most}

    layout = _layout(point(18, 1, False), point(20, 0.995, False), point(22, 0.96, True), point(24, 0.98, True))
    _, in_time = _curves({"layouts": [layout], "rate": 20.0, "attainment_level": 0.9})
    assert in_time.chart is not None
    assert [(each.shape, each.x, each.filled) for each in in_time.chart.series] == [
        ("line", [18, 20], [True, True]),
        ("points", [22, 24], [False, False]),
    ]
    assert in_time.chart.levels == [(0.99, "99%")]
    assert in_time.chart.marks == [(20.0, "the plan's rate")]


def test_the_front_joins_the_carried_points_that_no_other_beats_in_both() -> None:
    best = "co-located 1xTP1"
    tried = [
        _tried(best, 1, 50, 100),
        _tried(best, 2, 40, 200),
        _tried("co-located 2xTP1", 2, 39, 150),
        _tried("co-located 2xTP1", 3, 30, 300),
        _tried("co-located 2xTP1", 9, 45, 900, carries=False),
    ]
    (section,) = _pareto({"series": {"tried": tried}, "layouts": [_layout()]})
    assert section.chart is not None
    front, own, others = section.chart.series
    assert list(zip(front.x, front.y, strict=True)) == [(30, 300), (40, 200), (50, 100)]
    assert (own.name, own.x) == (best, [50, 40])
    assert others.filled == [True, True, False]
    assert others.notes[2] == "co-located 2xTP1 at 9/s"
    assert list(_pareto({"series": {"tried": []}, "layouts": [_layout()]})) == []
