"""The rivals that a page names."""

from pathlib import Path

import pytest

from ampd.errors import UserError
from benchmarks.best_layouts.entries import Engine, Entry, rivals
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
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    searched = {SETTING: [first_outcome(Searcher(Ledger(None), 1.08, lambda _: None, simulated), SETTING)]}
    path = tmp_path_factory.mktemp("named") / "page.md"
    path.write_text(tables(searched), encoding="utf-8")
    return path


def test_the_best_rivals_of_a_page_are_found_again(page: Path) -> None:
    assert [entry.label for entry in named_rivals(page, SETTING)] == ["deflection 1+3"]


def test_only_named_rivals_are_tried_where_the_engine_pauses(page: Path) -> None:
    tried = set[str]()

    def noted(entry: Entry, seed: int, rate: float) -> Point:
        tried.add(entry.label)
        return simulated(entry, seed, rate)

    searcher = Searcher(Ledger(None), 1.08, lambda _: None, noted)
    found = first_outcome(searcher, SETTING, named_rivals(page, SETTING))
    assert found.best[RIVAL, Engine.PAUSES]["sustained_rounds"].entry.label == "deflection 1+3"
    assert tried & {entry.label for entry in rivals(SETTING, Engine.PAUSES)} == {"deflection 1+3"}
    assert tried >= {entry.label for entry in rivals(SETTING, Engine.SHARES)}
    assert (PARTS, Engine.SHARES) in found.best


def test_a_setting_that_the_page_does_not_have_is_refused(page: Path) -> None:
    with pytest.raises(UserError, match="has no row of qwen3-32b toolbench 1xTP2"):
        named_rivals(page, OTHER)


def test_a_page_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"page\.md: cannot be read"):
        named_rivals(tmp_path / "page.md", SETTING)


def test_a_rival_that_does_not_exist_is_refused(page: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.md"
    other.write_text(page.read_text(encoding="utf-8").replace("deflection 1+3", "nobody 1+3"), encoding="utf-8")
    with pytest.raises(UserError, match="names 'nobody 1\\+3'"):
        named_rivals(other, SETTING)
