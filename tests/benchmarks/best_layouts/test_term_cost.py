"""The cost of a term is over that of ours."""

import pytest

from benchmarks.best_layouts.term_cost import CONTESTANTS, main


def test_every_term_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "8b tau-bench-airline 1xTP1", "--rate", "1", "--seconds", "1", "--repeats", "1"]) == 0
    _, _, ours, *others = capsys.readouterr().out.splitlines()
    assert ours.startswith("| ours | ")
    assert ours.endswith(" | 1.00 |")
    assert [line.split(" | ")[0] for line in others] == [f"| {each.label}" for each in CONTESTANTS[1:]]
