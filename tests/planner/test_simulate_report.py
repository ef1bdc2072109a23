"""Reports and timelines: complete, self-contained, and in the format that Perfetto reads."""

import re
from pathlib import Path

import pytest

from ampd.cli.main import main

BASE = ["simulate", "tau-bench-airline", "--model", "llama-3.1-8b", "--gpu", "h100", "--ttft", "0.2", "--itl", "0.02"]


@pytest.mark.slow
def test_the_rounds_that_missed_are_listed_with_their_causes(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    assert main([*BASE, "--ttft", "0.02", "--limit", "4", "--report", str(report)]) == 0
    page = report.read_text()
    assert re.search(r"Rounds that missed a target: predictive / on-time \(\d+\)", page)
    assert page.count("missed a target</text>") == 1, "in the legend of what the workers did"
    assert re.search(r"<td>TTFT \d+ ms of 20 ms</td><td>(local|remote) \(", page)


@pytest.mark.slow
def test_the_simulation_report_has_everything_in_one_file(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    flags = ["--rate", "2,8", "--mode", "disaggregated,colocated", "--routing", "ampd,always-remote"]
    assert main([*BASE, *flags, "--report", str(report)]) == 0
    page = report.read_text()
    for title in (
        "Attainment of rounds over the session rate",
        "Attainment of sessions over the session rate",
        "TTFT of initial prefills at 8 sessions/s",
        "Mean ITL of rounds",
        "Routes and reasons",
        "What the workers did",
    ):
        assert title in page
    assert page.count("<svg") == 8
    assert not re.search(r"(?:src|href)=\"http", page)
    assert "Simulated, not measured" in page
