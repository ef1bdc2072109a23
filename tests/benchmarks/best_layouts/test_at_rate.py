"""Entries at one rate."""

import pytest

from ampd.errors import UserError
from ampd.settings import parse_settings
from benchmarks.best_layouts.at_rate import PROG, AtRateSettings, entries_of, main
from benchmarks.policies.settings import Setting

TINY = Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02, 5.0)


def test_entries_are_found_by_their_labels() -> None:
    labels = [entry.label for entry in entries_of(TINY, "")]
    assert len(labels) == len(set(labels))
    rivals = ["co-located mixed passes", "deflection 1+1"]
    assert {"ours 1+1", "co-located ours", *rivals} <= set(labels)
    assert [entry.label for entry in entries_of(TINY, "; ".join(rivals))] == rivals
    with pytest.raises(UserError, match="no 'co-loc'; there are ours 1"):
        entries_of(TINY, "co-loc")


def test_a_row_has_the_mean_and_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "8b tau-bench-airline 1xTP1", "--rate", "1", "--seconds", "5", "--entries", "co-located ours"]
    assert main(only) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "| co-located ours | 100.0 / 100.0 | 100.0 / 100.0, 100.0 / 100.0 |"


def test_a_condition_is_what_the_flags_say() -> None:
    flags = ["--only", "8b", "--rate", "1", "--belief", "random", "--state-delay-s", "0.2", "--coordinators", "3"]
    condition = parse_settings(AtRateSettings, flags, PROG).condition
    assert (condition.belief, condition.state_delay_s, condition.coordinators) == ("random", 0.2, 3)


def test_wrong_times_change_what_is_attained(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "8b tau-bench-airline 1xTP1", "--rate", "30", "--seconds", "5", "--seeds", "1"]
    for belief in ("1", "3"):
        assert main([*only, "--entries", "ours with fixed roles 1+1", "--belief", belief]) == 0
    right, wrong = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| ours"))
    assert right != wrong
