"""The regret of plans: every layout counts, and a second run makes no trial again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import layout_regret
from benchmarks.layout_regret import Instance, every_layout, main
from planner.layout import trial
from planner.layout.layout import Layout
from planner.layout.trial import Horizon


def test_every_split_and_colocated_layout_is_there_once() -> None:
    found = list(every_layout((1, 2), 2))
    tp1, tp2, twice_tp1 = ((1, 1),), ((1, 2),), ((2, 1),)
    assert set(found) == {Layout((), tp1), Layout((), tp2), Layout((), twice_tp1), Layout(tp1, tp1)}
    assert len(found) == 4


@pytest.mark.slow
def test_a_second_run_makes_no_trial_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_QUICK", "_FULL"):
        monkeypatch.setattr(layout_regret, name, Horizon(4.0, 0.0, 60, 60))
    for name, value in {"_ROUND_TIMES": 0.2, "_SPEED": 0.1}.items():
        monkeypatch.setattr(trial, name, value)
    monkeypatch.setattr(layout_regret, "INSTANCES", [Instance("toolbench-answers", "llama-3.1-8b", "l40s", 0.5, 0.05)])
    argv = ["layout_regret", "--gpus", "2", "--budget-s", "0.000001", "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    assert main() == 0
    table = capsys.readouterr().out.splitlines()[:3]
    assert table[1].startswith("1 cases: regret ")
    assert "2 GPUs, 4 layouts: " in table[2]

    def again(*_: object) -> None:
        raise AssertionError("a trial was made again")

    monkeypatch.setattr(layout_regret, "TrialTask", again)
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[:3] == table
