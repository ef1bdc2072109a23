"""Standings compare contestants seed by seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.policies.campaign import Ledger, Task, search_all
from benchmarks.policies.contest import USUAL, Found
from benchmarks.policies.contestants import ALWAYS_REMOTE, COLOCATED, OURS
from benchmarks.policies.plots import relative
from benchmarks.policies.prepared import Prepared
from benchmarks.policies.standings import Standings

from .lab import PAIRS, TINY


@pytest.mark.usefixtures("counted")
def test_standings_compare_seed_by_seed(tmp_path: Path) -> None:
    ledger = Ledger(None)
    search_all(ledger, [*PAIRS, (TINY, COLOCATED, USUAL)], 2, Prepared(tmp_path), 1)
    standings = Standings(ledger, [TINY], [OURS, ALWAYS_REMOTE, COLOCATED], 2)
    assert standings.rivals == [ALWAYS_REMOTE]
    assert standings.best(TINY, standings.rivals, "sustained_rounds") == ALWAYS_REMOTE
    ratio = standings.ratio(TINY, OURS, ALWAYS_REMOTE, "sustained_rounds")
    assert ratio is not None
    assert ratio[0] == pytest.approx((1.0 / 0.4 * 1.1 / 0.5) ** 0.5)
    assert standings.ratio(TINY, OURS, None, "sustained_rounds") is None
    assert relative(standings, [TINY], ALWAYS_REMOTE, "sustained_rounds") == pytest.approx(0.45 / 1.05)


def test_a_rival_that_carries_nothing_is_no_best_and_no_ratio() -> None:
    ledger = Ledger(None)
    for our, value in ((OURS, 2.0), (ALWAYS_REMOTE, 0.0)):
        ledger.keep(Task(TINY, our, 0), Found({"sustained_rounds": value}, {}), 0.0)
    standings = Standings(ledger, [TINY], [OURS, ALWAYS_REMOTE], 1)
    assert standings.best(TINY, standings.rivals, "sustained_rounds") is None
    assert standings.ratio(TINY, OURS, ALWAYS_REMOTE, "sustained_rounds") is None
    assert relative(standings, [TINY], ALWAYS_REMOTE, "sustained_rounds") == pytest.approx(0.01)
