"""The timeline by itself: bars of a thread never cross."""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.cli.main import main
from planner.simulator.outcome import SimulationRun, Span, trace_events

WORKERS = {"prefill-0": "prefill", "decode-0": "decode"}
_READS = st.lists(st.tuples(st.sampled_from(sorted(WORKERS)), st.integers(0, 30), st.integers(0, 9)), max_size=25)


def run_of(*spans: Span) -> SimulationRun:
    return SimulationRun([], {}, [], WORKERS, 1.0, timeline=sorted(spans, key=lambda span: span.end_s))


def read(worker_id: str, session: str, start_s: float, end_s: float) -> Span:
    return Span(worker_id, "kv-in", "kv-increment", start_s, end_s, {"session": session, "tokens": 16})


@given(_READS)
def test_reads_that_overlap_stand_on_named_threads_of_their_own(reads: list[tuple[str, int, int]]) -> None:
    events = list(trace_events(run_of(*(read(who, "s", start, start + length) for who, start, length in reads))))
    bars = [event for event in events if event["ph"] == "X"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert len(bars) == len(reads)
    assert {(bar["pid"], bar["tid"]) for bar in bars} <= named
    for thread in named:
        own = sorted((bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if (bar["pid"], bar["tid"]) == thread)
        assert all(before[1] <= after[0] for before, after in pairwise(own))


def test_reads_one_after_the_other_share_a_thread() -> None:
    events = trace_events(run_of(read("decode-0", "a", 0.0, 1.0), read("decode-0", "b", 1.0, 2.0)))
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == ["compute", "kv-in"] * 2


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
    assert set(kinds) == {"M", "X", "C"}
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


@pytest.mark.parametrize("flag", ["--report", "--timeline"])
def test_a_file_that_cannot_be_written_is_one_line(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, flag, str(tmp_path / "none" / "x.html")]) == 2
    out, err = capsys.readouterr()
    assert out == "", "refused before anything is simulated"
    assert "cannot be written" in err
    assert len(err.splitlines()) == 1
