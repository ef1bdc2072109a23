"""Entries at one rate."""

import pytest

from ampd.errors import UserError
from benchmarks.best_layouts.at_rate import entries_of, main
from benchmarks.policies.settings import Setting

TINY = Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02, 5.0)


def test_entries_are_found_by_their_labels() -> None:
    labels = [entry.label for entry in entries_of(TINY, "")]
    assert len(labels) == len(set(labels))
    assert {"ours looking ahead 1+1", "co-located ours, shared passes", "deflection 1+1", "dynaserve"} <= set(labels)
    assert [entry.label for entry in entries_of(TINY, "dynaserve; deflection 1+1")] == ["dynaserve", "deflection 1+1"]
    with pytest.raises(UserError, match="no 'dyna'; there are ours looking ahead 1"):
        entries_of(TINY, "dyna")


def test_a_row_has_the_mean_and_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "8b tau-bench-airline 1xTP1", "--rate", "1", "--seconds", "5", "--entries", "co-located ours"]
    assert main(only) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "| co-located ours | 100.0 / 100.0 | 100.0 / 100.0, 100.0 / 100.0 |"
