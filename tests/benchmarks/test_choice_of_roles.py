"""The comparison of ways to choose roles: its settings, its rates, and its tables."""

from dataclasses import replace
from pathlib import Path

from benchmarks.best_layouts.entries import Entry
from benchmarks.choice_of_roles.__main__ import Simulator
from benchmarks.choice_of_roles.cases import AHEAD, CASES, LOADS, START, WAYS, WRONG_MODELS, static_layouts, ways
from benchmarks.choice_of_roles.table import Cell, setting_table, summary_table, tables
from benchmarks.policies.campaign import Ledger
from benchmarks.policies.contest import Point

POINT = Point(0.9, 0.8, 1.0, 1.0, 1.0, 0.0)


def cell(ahead: float, seed: int = 101, load: int = 0) -> Cell:
    by_way = {way.label: POINT for way in WAYS} | {AHEAD.label: replace(POINT, rounds=ahead)}
    static = {"co-located": replace(POINT, rounds=0.95), "1+3": replace(POINT, sessions=0.85), "3+1": POINT}
    return Cell("toolbench", LOADS[load], seed, 9.0, by_way, static)


def row_of(table: str, name: str) -> list[str]:
    return next(line for line in table.splitlines() if line.startswith(f"| {name} |")).strip("| ").split(" | ")


def test_every_setting_starts_from_an_even_split_and_has_other_layouts() -> None:
    for case in CASES:
        assert case.setting.prefill == case.setting.decode
        workers = sum(group.replicas for group in case.setting.cluster().colocated().decode)
        others = set(static_layouts(case, LOADS[0])) - {"co-located"}
        assert others == {
            f"{count}+{workers - count}" for count in {workers // 4, workers - workers // 4} - {workers, 0}
        }
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_wrong_model_is_tried_with_the_ways_that_look_ahead_only() -> None:
    assert AHEAD.label in ways(CASES[0], WRONG_MODELS[0])
    assert len(ways(CASES[0], WRONG_MODELS[0])) < len(ways(CASES[0], LOADS[0])) == len(WAYS)
    assert not static_layouts(CASES[0], WRONG_MODELS[0])


def test_the_summary_has_the_mean_and_the_lowest_of_cases_and_runs() -> None:
    cells = [cell(0.95), cell(0.88, seed=102), cell(0.86, load=1), cell(0.88, seed=102, load=1)]
    table = summary_table(cells, "the start", lambda each, figure: getattr(each.ways[START.label], figure))
    assert row_of(table, AHEAD.label) == [
        AHEAD.label,
        "-0.8",
        "-3.0",
        "1 of 2",
        "-4.0",
        "+0.0",
        "+0.0",
        "0 of 2",
        "+0.0",
    ]


def test_the_best_static_layout_counts_co_located_serving_and_the_start() -> None:
    text = tables([cell(0.97)])
    against = text[text.index("against the best static layout") :]
    assert row_of(against, AHEAD.label)[1] == "+2.0"
    assert row_of(against, AHEAD.label)[5] == "-5.0"
    assert setting_table([cell(0.97)], "sessions").endswith("| 80.0 | 85.0 1+3 |")


def test_what_the_file_has_is_not_simulated_again(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    entry = Entry(START, replace(CASES[5].setting, duration_s=1.0))
    first = Simulator(Ledger(data)).point(entry, 101, 20.0)
    size = data.stat().st_size
    assert Simulator(Ledger(data)).point(entry, 101, 20.0) == first
    assert data.stat().st_size == size
    Simulator(Ledger(data, frozenset({START.label}))).point(entry, 101, 20.0)
    assert data.stat().st_size == 2 * size
