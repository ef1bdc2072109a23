"""The map of targets: its cells, its comparison, and its picture."""

from dataclasses import replace
from pathlib import Path

from benchmarks.policies.contest import Point
from benchmarks.policies.contestants import OURS_AHEAD
from benchmarks.result_files import file_name
from benchmarks.target_map import ITL_FACTORS, TTFT_FACTORS, WORKLOADS, Cell, draw, map_table, static_entries, tables

POINT = Point(0.9, 0.8, 1.0, 1.0, 1.0, 0.0)


def cells(ours: float) -> list[Cell]:
    static = {"co-located": replace(POINT, rounds=0.95), "2+2": POINT}
    return [Cell(setting, {OURS_AHEAD.label: replace(POINT, rounds=ours)}, static) for setting in WORKLOADS[0].cells()]


def test_every_pair_of_targets_is_a_cell_and_the_middle_is_the_setting() -> None:
    for workload in WORKLOADS:
        settings = list(workload.cells())
        assert len({(each.ttft_s, each.itl_s) for each in settings}) == len(TTFT_FACTORS) * len(ITL_FACTORS) == 25
        assert settings[12] == workload.setting
        assert workload.setting.prefill == workload.setting.decode
        assert set(static_entries(workload.setting)) == {"co-located", "2+2", "1+3", "3+1"}


def test_a_cell_below_the_best_static_layout_stands_out() -> None:
    below, above = map_table(cells(0.92), "rounds"), map_table(cells(0.97), "rounds")
    assert below.count("**92.0 / 95.0 co-located**") == 25
    assert "**" not in above
    summary = tables({WORKLOADS[0]: cells(0.92)})["summary"]
    assert "| +2.0 | +2.0 | 0 of 25 | -3.0 | -3.0 | 25 of 25 | -3.0 | -3.0 | 25 of 25 |" in summary


def test_the_project_has_a_file_of_each_table() -> None:
    names = {file_name(f"target map {title}") for title in tables({each: cells(0.92) for each in WORKLOADS})}
    results = Path(__file__).parents[2] / "benchmarks/results/policies"
    assert names == {path.name for path in results.glob("target-map-*.csv")}


def test_the_picture_names_the_best_layout_of_each_cell(tmp_path: Path) -> None:
    draw({WORKLOADS[0]: cells(0.92)}, tmp_path / "map.svg")
    text = (tmp_path / "map.svg").read_text(encoding="utf-8")
    assert text.count("95 % co-located") == 25
    assert "-3.0" in text or "\u22123.0" in text
