"""The report of a plan: the layouts, the reasons and the capacities, in one file."""

from pathlib import Path

import pytest

from ampd.cli.main import main


@pytest.mark.slow
def test_the_plan_report_shows_the_layouts_and_why(tmp_path: Path, curves: Path) -> None:
    report = tmp_path / "plan.html"
    argv = ["plan", "tau-bench-airline", "--model", "llama-3.1-8b", "--gpu", "h100", "--gpus", "3", "--rate", "4"]
    assert main([*argv, "--degrees", "1", "--cache", str(curves), "--report", str(report)]) == 0
    page = report.read_text()
    for words in ("Layouts, best first", "What binds is", "What a GPU carries: prefill", "TP1"):
        assert words in page
    assert page.count("<svg") == 2
