"""Reports and timelines: complete, self-contained, and in the format that Perfetto reads."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main

BASE = ["simulate", "tau-bench-airline", "--model", "llama-3.1-8b", "--gpu", "h100", "--ttft", "0.2", "--itl", "0.02"]


def test_the_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    plain, packed = tmp_path / "timeline.json", tmp_path / "timeline.json.gz"
    assert (
        main([*BASE, "--rate", "4", "--routing", "always-remote", "--slicing", "whole", "--timeline", str(plain)]) == 0
    )
    assert (
        main([*BASE, "--rate", "4", "--routing", "always-remote", "--slicing", "whole", "--timeline", str(packed)]) == 0
    )
    trace: dict[str, Any] = json.loads(plain.read_text())
    assert json.loads(gzip.decompress(packed.read_bytes())) == trace
    events = trace["traceEvents"]
    kinds = Counter(event["ph"] for event in events)
    assert set(kinds) == {"M", "X", "C", "s", "f"}
    assert kinds["s"] == kinds["f"] > 0
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["decode-0", "prefill-0"]
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        assert event["pid"] in names
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in threads
    prefills = [event for event in events if event["name"] == "prefill" and names[event["pid"]] == "prefill-0"]
    assert len(prefills) == 105, "one for every round"
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    assert all(event["ts"] >= starts[event["id"]] for event in events if event["ph"] == "f")


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


def test_the_plan_report_shows_the_layouts_and_why(tmp_path: Path) -> None:
    report = tmp_path / "plan.html"
    argv = ["plan", "tau-bench-airline", "--model", "llama-3.1-8b", "--gpu", "h100", "--gpus", "3", "--rate", "4"]
    assert main([*argv, "--no-use-cache", "--report", str(report)]) == 0
    page = report.read_text()
    for words in ("Layouts, best first", "What binds is", "What a GPU carries: prefill", "TP1"):
        assert words in page
    assert page.count("<svg") == 2


@pytest.mark.parametrize("flag", ["--report", "--timeline"])
def test_a_file_that_cannot_be_written_is_one_line(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, flag, str(tmp_path / "none" / "x.html")]) == 2
    out, err = capsys.readouterr()
    assert out == "", "refused before anything is simulated"
    assert "cannot be written" in err
    assert len(err.splitlines()) == 1
