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


def test_the_best_rivals_of_tables_are_found_again(results: Path) -> None:
    assert [entry.label for entry in named_rivals(results, SETTING)] == ["deflection 1+3"]


def test_only_named_rivals_are_tried(results: Path) -> None:
    tried = set[str]()

    def noted(entry: Entry, seed: int, rate: float) -> Point:
        tried.add(entry.label)
        return simulated(entry, seed, rate)

    searcher = Searcher(Ledger(None), 1.08, lambda _: None, noted)
    found = first_outcome(searcher, SETTING, named_rivals(results, SETTING))
    assert found.best[RIVAL]["sustained_rounds"].entry.label == "deflection 1+3"
    assert tried & {entry.label for entry in rivals(SETTING)} == {"deflection 1+3"}
    assert PARTS in found.best


def test_a_setting_that_the_tables_do_not_have_is_refused(results: Path) -> None:
    with pytest.raises(UserError, match=r"no table in .* has a row of qwen3-32b toolbench 1xTP2"):
        named_rivals(results, OTHER)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no table in .*nowhere has a row"):
        named_rivals(tmp_path / "nowhere", SETTING)


def test_a_rival_that_does_not_exist_is_refused(results: Path, tmp_path: Path) -> None:
    for path in results.iterdir():
        text = path.read_text(encoding="utf-8").replace("deflection 1+3", "nobody 1+3")
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="names 'nobody 1\\+3'"):
        named_rivals(tmp_path, SETTING)
