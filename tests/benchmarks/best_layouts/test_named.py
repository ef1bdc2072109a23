"""The rivals that tables of an earlier search name."""

from pathlib import Path

import pytest

from ampd.errors import UserError
from benchmarks import result_files
from benchmarks.best_layouts.entries import Entry, rivals
from benchmarks.best_layouts.named import named_rivals
from benchmarks.best_layouts.search import PARTS, RIVAL, Searcher, first_outcome
from benchmarks.best_layouts.table import tables
from benchmarks.policies.campaign import Ledger
from benchmarks.policies.contest import Point
from benchmarks.policies.settings import Setting

SETTING = Setting("qwen3-32b", "h20", "toolbench", "2xTP2", "2xTP2", 0.35, 0.04)
OTHER = Setting("qwen3-32b", "h20", "toolbench", "1xTP2", "1xTP2", 0.35, 0.04)


def simulated(entry: Entry, _: int, rate: float) -> Point:
    """Deflection carries most on 1 + 3, the others carry less."""
    carried = 9.0 if entry.label == "deflection 1+3" else 5.0
    share = float(rate <= carried)
    return Point(share, share, share, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    searched = {SETTING: [first_outcome(Searcher(Ledger(None), 1.08, lambda _: None, simulated), SETTING)]}
    folder = tmp_path_factory.mktemp("named")
    result_files.write(folder, "best layouts", tables(searched), "a command")
    return folder


def test_the_best_rivals_of_any_setting_are_tried_on_every_layout(results: Path) -> None:
    for setting, labels in (
        (SETTING, ["deflection 2+2", "deflection 1+3", "deflection 3+1"]),
        (OTHER, ["deflection 1+1"]),
    ):
        assert [entry.label for entry in named_rivals(results, setting)] == labels


def test_only_named_rivals_are_tried(results: Path) -> None:
    tried = set[str]()

    def noted(entry: Entry, seed: int, rate: float) -> Point:
        tried.add(entry.label)
        return simulated(entry, seed, rate)

    searcher = Searcher(Ledger(None), 1.08, lambda _: None, noted)
    found = first_outcome(searcher, SETTING, named_rivals(results, SETTING))
    assert found.best[RIVAL]["sustained_rounds"].entry.label == "deflection 1+3"
    labels = {entry.label for entry in named_rivals(results, SETTING)}
    assert tried & {entry.label for entry in rivals(SETTING)} == labels
    assert PARTS in found.best


def test_tables_without_a_rival_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no table in .*nowhere has a rival"):
        named_rivals(tmp_path / "nowhere", SETTING)
