"""The best of several entries, and a run that goes on where another one ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.best_layouts.entries import Entry
from benchmarks.best_layouts.search import CRITERIA, Searcher, _after_the_start, first_outcome, further_outcome
from benchmarks.policies.campaign import Ledger
from benchmarks.policies.contest import Point, run
from benchmarks.policies.contestants import ALWAYS_REMOTE, OURS_STATIC
from benchmarks.policies.settings import Setting

TINY = Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02, duration_s=5.0)
REMOTE, OURS = Entry(ALWAYS_REMOTE, TINY), Entry(OURS_STATIC, TINY)
START = dict.fromkeys(CRITERIA, 1.0)
CARRIED = {REMOTE: 4.0, OURS: 7.0}
"""Sessions per second at which an entry still serves all rounds in time."""


def point(is_carried: bool) -> Point:
    return Point(float(is_carried), float(is_carried), float(is_carried), 0.0, 0.0, 0.0)


@dataclass
class Simulations:
    """Simulations that take no time, counted."""

    calls: int = 0

    def __call__(self, entry: Entry, _: int, rate: float) -> Point:
        self.calls += 1
        return point(rate <= CARRIED[replace(entry, setting=TINY)])


def test_the_entry_with_the_highest_rate_is_found() -> None:
    lines: list[str] = []
    found = Searcher(Ledger(None), 1.05, lines.append, Simulations()).best([REMOTE, OURS], 0, START)
    assert set(found) == set(CRITERIA)
    for goodput in found.values():
        assert goodput.entry == OURS
        assert 7.0 / 1.05 <= goodput.rate <= 7.0
    assert lines[-1].endswith("ours with fixed roles 1+1")


def test_an_entry_far_below_the_best_costs_one_short_simulation_per_criterion() -> None:
    best, both = Simulations(), Simulations()
    Searcher(Ledger(None), 1.05, print, best).best([OURS], 0, START)
    Searcher(Ledger(None), 1.05, print, both).best([OURS, REMOTE], 0, START)
    assert both.calls <= best.calls + len(CRITERIA)


def test_a_run_goes_on_with_the_simulations_of_its_file(tmp_path: Path) -> None:
    data, again = tmp_path / "data.jsonl", Simulations()
    first = Searcher(Ledger(data), 1.05, print, Simulations()).best([REMOTE, OURS], 0, START)
    assert Searcher(Ledger(data), 1.05, print, again).best([REMOTE, OURS], 0, START) == first
    assert again.calls == 0


def test_a_further_seed_searches_ours_and_the_best_of_the_first_one() -> None:
    """Every entry carries the same here, so the first rival and the first of our parts are the best ones."""
    searcher = Searcher(Ledger(None), 1.05, print, lambda _, seed, rate: point(rate <= 5.0 + seed))
    first = first_outcome(searcher, TINY)
    second = further_outcome(searcher, TINY, 1, first)
    for outcome, carried in ((first, 5.0), (second, 6.0)):
        rates = [rate for found in outcome.ours.values() for rate in found.values()]
        rates += [goodput.rate for best in outcome.best.values() for goodput in best.values()]
        assert all(carried / 1.05 <= rate <= carried for rate in rates)
    assert {kind: best["sustained_rounds"].entry for kind, best in second.best.items()} == {
        kind: best["sustained_rounds"].entry for kind, best in first.best.items()
    }


@pytest.mark.slow
def test_the_first_sessions_do_not_count() -> None:
    sessions, done = run(TINY, OURS_STATIC, 8.0, 0)
    counted, kept = _after_the_start(sessions, done)
    assert len(counted) == 60
    assert counted[0].arrival_s > sessions[0].arrival_s
    assert {record.session_id for record in kept.rounds} == {session.session_id for session in counted}
    assert kept.attainment(TINY.slo).sessions == pytest.approx(1.0, abs=0.5)


def test_an_entry_is_named_by_its_layout() -> None:
    assert replace(REMOTE, setting=replace(TINY, prefill="2xTP1")).label == "always-remote 2+1"
