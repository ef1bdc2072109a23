"""Ours with shared passes against the rivals that have them."""

from __future__ import annotations

import pytest

from ampd.policies.registry import create_named
from benchmarks.best_layouts.entries import Entry
from benchmarks.best_layouts.search import Searcher
from benchmarks.best_layouts.shared_passes import ours, rates_of, rivals, table
from benchmarks.policies.campaign import Ledger
from benchmarks.policies.contest import Point
from benchmarks.policies.settings import Setting

TINY = Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02, duration_s=5.0)


def carried(entry: Entry, seed: int) -> float:
    """Ours carry twice what rivals do, and each seed more than the one before."""
    return (8.0 if entry.contestant in ours() else 4.0) * (1 + seed)


def simulated(entry: Entry, seed: int, rate: float) -> Point:
    share = float(rate <= carried(entry, seed))
    return Point(share, share, share, 0.0, 0.0, 0.0)


def test_rates_are_found_for_every_seed_and_ratios_are_to_the_best_rival() -> None:
    rates = rates_of(Searcher(Ledger(None), 1.02, print, simulated), TINY, 2)
    assert len(rates) == len(ours()) + len(rivals()) == 6
    for contestant in ours():
        for seed, by_criterion in enumerate(rates[contestant.label]):
            for rate in by_criterion.values():
                assert rate == pytest.approx(8.0 * (1 + seed), rel=0.02)
    *_, last = table({"tiny": rates}).splitlines()
    assert last.endswith("below 1 in 0 of 1")
    mean = float(last.split("mean ")[1].split(",")[0])
    assert mean == pytest.approx(2.0, rel=0.04)


def test_ours_share_their_passes() -> None:
    for contestant in ours():
        assert create_named("slicing", contestant.slicing).shares_passes
