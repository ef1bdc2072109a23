"""Tables of outcomes: ratios seed by seed, losses counted."""

from pathlib import Path

from benchmarks.best_layouts.entries import OURS_FROM_EVEN, Entry
from benchmarks.best_layouts.search import CRITERIA, PARTS, RIVAL, Goodput, Outcome
from benchmarks.best_layouts.table import tables
from benchmarks.markdown_table import titled
from benchmarks.policies.contestants import ALWAYS_REMOTE, COLOCATED_OURS
from benchmarks.policies.settings import Setting
from benchmarks.result_files import file_name

RESULTS = Path(__file__).parents[3] / "benchmarks/results/policies"
TINY = Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02)


def outcome(mine: float, rival: float, parts: float) -> Outcome:
    rates = {each.label: dict.fromkeys(CRITERIA, mine) for each in OURS_FROM_EVEN}
    best = {
        kind: {each: Goodput(Entry(contestant, TINY), rate) for each in CRITERIA}
        for kind, contestant, rate in ((RIVAL, ALWAYS_REMOTE, rival), (PARTS, COLOCATED_OURS, parts))
    }
    return Outcome(rates, best)


NAME = "llama-3.1-8b tau-bench-airline 1xTP1+1xTP1 h100"


def test_a_win_and_a_loss_are_shown_with_the_layouts() -> None:
    text = titled(tables({TINY: [outcome(6.0, 4.0, 8.0)]}))
    assert f"| {NAME} | 1 | 24.5 | 6 | 4 always-remote 1+1 | 1.50 | 8 co-located ours | 0.75 |" in text
    assert "| limit, rounds | 6.13 | 6.13 | 0 of 1 | 3.06 | 3.06 | 0 of 1 |" in text
    assert "| ours, rounds | 1.50 | 1.50 | 0 of 1 | 0.75 | 0.75 | 1 of 1 |" in text


def test_the_project_has_a_file_of_each_table() -> None:
    names = {file_name(f"best layouts {title}") for title in tables({TINY: [outcome(6.0, 4.0, 8.0)]})}
    assert names == {path.name for path in RESULTS.glob("best-layouts-*.csv")}


def test_seeds_make_intervals_and_a_rival_that_carries_nothing_makes_no_ratio() -> None:
    text = titled(tables({TINY: [outcome(6.0, 0.0, 8.0), outcome(6.6, 0.0, 8.0), outcome(7.2, 0.0, 8.0)]}))
    row = next(line for line in text.splitlines() if line.startswith("| llama"))
    assert "| 3 | 24.5 | 6.6 ± 1.5 |" in row
    assert "| - |" in row
    assert "0.82 (" in row
