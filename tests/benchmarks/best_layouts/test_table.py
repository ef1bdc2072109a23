"""Tables of outcomes: ratios seed by seed, losses counted."""

from pathlib import Path

from benchmarks.best_layouts.entries import OURS_FROM_EVEN, Engine, Entry, on
from benchmarks.best_layouts.search import CRITERIA, PARTS, RIVAL, Goodput, Outcome
from benchmarks.best_layouts.table import tables
from benchmarks.markdown_table import titled
from benchmarks.policies.contestants import ALWAYS_REMOTE, COLOCATED, COLOCATED_OURS
from benchmarks.policies.settings import Setting
from benchmarks.result_files import file_name

RESULTS = Path(__file__).parents[3] / "benchmarks/results/policies"
TINY = Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02)


def outcome(mine: float, rival: float, parts: float, *, shared: float = 1.0) -> Outcome:
    """`shared`: rates with shared passes, over those without."""
    rates: dict[str, dict[str, float]] = {}
    best = {}
    for engine, factor in ((Engine.PAUSES, 1.0), (Engine.SHARES, shared)):
        rates |= {each.label: dict.fromkeys(CRITERIA, factor * mine) for each in on(engine, OURS_FROM_EVEN)}
        other = ALWAYS_REMOTE if engine is Engine.PAUSES else COLOCATED
        for kind, contestant, rate in ((RIVAL, other, rival), (PARTS, COLOCATED_OURS, parts)):
            best[kind, engine] = {each: Goodput(Entry(contestant, TINY), factor * rate) for each in CRITERIA}
    return Outcome(rates, best)


NAME = "llama-3.1-8b tau-bench-airline 1xTP1+1xTP1 h100"


def test_a_win_and_a_loss_are_shown_with_the_layouts() -> None:
    text = titled(tables({TINY: [outcome(6.0, 4.0, 8.0, shared=2.0)]}))
    assert (
        f"| {NAME} | 1 | 24.5 | 6 | 4 always-remote 1+1 | 1.50 | 8 co-located | 0.75 | 8 co-located ours | 0.75 |"
        in text
    )
    assert (
        f"| {NAME} | 1 | 24.5 | 12 | 4 always-remote 1+1 | 3.00 | 8 co-located | 1.50 | 16 co-located ours | 0.75 |"
        in text
    )
    assert "| limit, rounds | 6.13 | 6.13 | 0 of 1 | 3.06 | 3.06 | 0 of 1 | 1.53 | 1.53 | 0 of 1 |" in text
    losses = "0.75 | 0.75 | 1 of 1"
    assert f"| ours, rounds | 1.50 | 1.50 | 0 of 1 | {losses} | {losses} |" in text
    assert f"| ours, shared passes, rounds | 3.00 | 3.00 | 0 of 1 | 1.50 | 1.50 | 0 of 1 | {losses} |" in text


def test_the_project_has_a_file_of_each_table() -> None:
    names = {file_name(f"best layouts {title}") for title in tables({TINY: [outcome(6.0, 4.0, 8.0)]})}
    assert names == {path.name for path in RESULTS.glob("best-layouts-*.csv")}


def test_seeds_make_intervals_and_a_rival_that_carries_nothing_makes_no_ratio() -> None:
    text = titled(tables({TINY: [outcome(6.0, 0.0, 8.0), outcome(6.6, 0.0, 8.0), outcome(7.2, 0.0, 8.0)]}))
    row = next(line for line in text.splitlines() if line.startswith("| llama"))
    assert "| 3 | 24.5 | 6.6 ± 1.5 |" in row
    assert "| - |" in row
    assert "0.82 (" in row
