"""Tables of outcomes: ratios seed by seed, losses counted."""

from benchmarks.best_layouts.entries import OURS_FROM_EVEN, Entry
from benchmarks.best_layouts.search import CRITERIA, PARTS, RIVAL, Goodput, Outcome
from benchmarks.best_layouts.table import tables
from benchmarks.policies.contestants import ALWAYS_REMOTE, COLOCATED_OURS
from benchmarks.policies.settings import Setting

TINY = Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02)


def outcome(mine: float, rival: float, parts: float) -> Outcome:
    return Outcome(
        {each.label: dict.fromkeys(CRITERIA, mine) for each in OURS_FROM_EVEN},
        {
            RIVAL: {criterion: Goodput(Entry(ALWAYS_REMOTE, TINY), rival) for criterion in CRITERIA},
            PARTS: {criterion: Goodput(Entry(COLOCATED_OURS, TINY), parts) for criterion in CRITERIA},
        },
    )


def test_a_win_and_a_loss_are_shown_with_the_layouts() -> None:
    text = tables({TINY: [outcome(6.0, 4.0, 8.0)]})
    name = "llama-3.1-8b tau-bench-airline 1xTP1+1xTP1 h100"
    assert f"| {name} | 1 | 6 | 4 always-remote 1+1 | 1.50 | 8 co-located ours | 0.75 |" in text
    assert "| ours looking ahead, rounds | 1.50 | 1.50 | 0 of 1 | 0.75 | 0.75 | 1 of 1 |" in text


def test_seeds_make_intervals_and_a_rival_that_carries_nothing_makes_no_ratio() -> None:
    text = tables({TINY: [outcome(6.0, 0.0, 8.0), outcome(6.6, 0.0, 8.0), outcome(7.2, 0.0, 8.0)]})
    row = next(line for line in text.splitlines() if line.startswith("| llama"))
    assert "| 3 | 6.6 ± 1.5 |" in row
    assert "| - |" in row
    assert "0.82 (" in row
