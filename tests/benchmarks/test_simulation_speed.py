"""The tables of the simulator's speed."""

from __future__ import annotations

import pytest

from benchmarks.simulation_speed import DEFAULT, PAPER, PURE, row, summary


def run(seconds: float) -> dict[str, float]:
    return {"seconds": seconds, "process_s": 2 * seconds, "rounds": 100.0, "virtual_s": 9.0}


def test_both_kinds_of_policies_are_compared_with_the_faster_router() -> None:
    runs = {DEFAULT: [run(2.0), run(0.1), run(1.0)], PAPER: [run(0.5)], PURE: [], "round_robin": [run(4.0)]}
    result = summary(runs | {"kv_router": [run(3.0)]}, 300)
    assert result["systems"][DEFAULT]["rounds_per_s"] == 300, "of the median"
    assert result["ratios_to_faster_router"][DEFAULT]["rounds_per_s"] == pytest.approx(3.0)
    assert result["ratios_to_faster_router"][PAPER]["rounds_per_s_process"] == pytest.approx(6.0)
    cells = row({"workload": "gaia", "sessions": 1500} | result).strip("| ").split(" | ")
    assert cells == ["`gaia`", "1,500", "300", "600", "-", "100", "3.00", "6.00", "3.00"]
