"""Reports: complete, self-contained, and small however long the simulation."""

import json
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
    assert re.search(r"Rounds that missed a target \(\d+\)", page)
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
        "figures and charts are of 8 sessions/s",
        "TTFT of initial prefills",
        "Mean ITL of rounds",
        "Output tokens per second over time",
        "Input length of rounds (ISL)",
        "Routes and reasons",
        "How busy the workers were",
    ):
        assert title in page
    assert page.count('<div class="chart">') == 15
    assert not re.search(r"(?:src|href)=\"http", page)
    assert "Simulated, not measured" in page


@pytest.mark.slow
def test_a_worker_computes_for_a_share_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--rate", "2", "--limit", "30", "--json"]) == 0
    prefill, decode = json.loads(capsys.readouterr().out)["workers"]
    assert (prefill["worker"], decode["worker"]) == ("prefill-0", "decode-0")
    assert 0 < prefill["prefill"] < 1
    assert prefill["decode"] == 0
    assert 0 < decode["prefill"] < decode["decode"] < 1
    assert decode["prefill"] + decode["decode"] < 1


@pytest.mark.long
def test_the_report_does_not_grow_with_the_sessions(tmp_path: Path) -> None:
    sizes = []
    for limit in (1000, 3000):
        report = tmp_path / "report.html"
        flags = ["--prefill", "2xTP1", "--decode", "2xTP1", "--rate", "6", "--limit", str(limit)]
        assert main([*BASE, *flags, "--report", str(report)]) == 0
        sizes.append(report.stat().st_size)
    assert sizes[1] < 1.1 * sizes[0]
    assert sizes[1] < 300_000
