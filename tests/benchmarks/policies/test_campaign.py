"""The ledger of searches: what is kept is not searched again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ampd.errors import UserError
from benchmarks.policies.campaign import Ledger, Task, search_all
from benchmarks.policies.contestants import ALWAYS_REMOTE, OURS
from benchmarks.policies.prepared import Prepared

from .lab import PAIRS, TINY, Counted


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, counted: Counted) -> None:
    data = tmp_path / "data.jsonl"
    search_all(Ledger(data), PAIRS, 3, Prepared(tmp_path), 1)
    assert counted.calls == 6
    lines = data.read_text().splitlines(keepends=True)
    # The last but one is gone, the last was cut while it was written.
    data.write_text("".join([*lines[:4], lines[5][:40]]))
    ledger = Ledger(data)
    assert len(ledger.results) == 4
    search_all(ledger, PAIRS, 3, Prepared(tmp_path), 1)
    assert counted.calls == 8
    assert sorted(data.read_text().splitlines(keepends=True)) == sorted(lines)
    search_all(Ledger(data), PAIRS, 3, Prepared(tmp_path), 1)
    assert counted.calls == 8
    search_all(Ledger(data, frozenset({"ours"})), PAIRS, 3, Prepared(tmp_path), 1)
    assert counted.calls == 11


def test_a_data_file_of_something_else_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"some": "thing"}\n')
    with pytest.raises(UserError, match=re.escape("data.jsonl, line 1: is no result")):
        Ledger(data)


def test_who_is_far_behind_gets_no_further_seeds(tmp_path: Path, counted: Counted) -> None:
    ledger = Ledger(None)
    search_all(ledger, PAIRS, 3, Prepared(tmp_path), 1, race=0.5)
    assert counted.calls == 4
    assert ledger.found(Task(TINY, OURS, 2)) is not None
    assert ledger.found(Task(TINY, ALWAYS_REMOTE, 1)) is None


@pytest.mark.usefixtures("counted")
def test_results_belong_to_policies_and_not_to_labels(tmp_path: Path) -> None:
    ledger = Ledger(None)
    search_all(ledger, PAIRS, 1, Prepared(tmp_path), 1)
    assert ledger.found(Task(TINY, replace(OURS, label="another name"), 0)) is not None
    assert ledger.found(Task(TINY, replace(OURS, slicing="whole"), 0)) is None
    assert ledger.found(Task(replace(TINY, ttft_s=0.4), OURS, 0)) is None
