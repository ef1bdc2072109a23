"""Ours with one term changed."""

from __future__ import annotations

from benchmarks.best_layouts.ablation import CHANGED, outcomes, table
from benchmarks.best_layouts.entries import Entry
from benchmarks.best_layouts.search import CRITERIA, Searcher
from benchmarks.policies.campaign import Ledger
from benchmarks.policies.contest import Point
from benchmarks.policies.contestants import OURS
from benchmarks.policies.settings import Setting

TINY = Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02, duration_s=5.0)


def simulated(entry: Entry, seed: int, rate: float) -> Point:
    """Ours carries 4 sessions per second times the seed's factor, and half of it with fixed roles."""
    carried = (2.0 if entry.contestant.pools == "static" else 4.0) * (1 + seed)
    share = float(rate <= carried)
    return Point(share, share, share, 0.0, 0.0, 0.25, 0 if entry.contestant.pools == "static" else 3)


def test_each_term_is_a_share_of_ours_with_its_costs() -> None:
    found = outcomes(Searcher(Ledger(None), 1.02, print, simulated), TINY, 2)
    assert list(found) == [OURS.label, *(each.label for each in CHANGED)]
    rows = {line.split(" | ")[0].strip("| "): line for line in table({"tiny": found}).splitlines()[2:]}
    assert rows[OURS.label].endswith("| 1.00 | 3.0 | 75 % |")
    assert "| 0.50 | " in rows["fixed roles"]
    assert rows["fixed roles"].endswith("| 0.0 | 75 % |")
    assert "| 1.00 | " in rows["any session may move"]


def test_each_changes_something_and_no_two_are_alike() -> None:
    specs = [each.spec for each in (OURS, *CHANGED)]
    assert len(set(specs)) == len(specs)
    assert len(CRITERIA) == 2
