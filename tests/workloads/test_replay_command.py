"""`ampd replay`: its flags, a malformed trace, and an interrupt."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ampd.cli.main import main
from tests.waiting import PATIENCE_S
from tests.workloads.openai_server import Behaviour, serve
from workloads.trace import Round, write_trace

from .lab import GROWING, session


@pytest.mark.long
def test_an_interrupt_prints_the_partial_result(tmp_path: Path) -> None:
    """Of two rounds the first has ended, and the second never will."""
    rounds = [Round(incr_tokens=2, output_tokens=1)] * 2
    trace, out = tmp_path / "t.jsonl", tmp_path / "r.json"
    write_trace([session("a", *rounds)], trace)
    behaviour = Behaviour(answered_rounds=1)
    with serve(behaviour) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "ampd", "replay", trace, "--url", url, "--json", out, "--ttft", "9", "--itl", "9"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert behaviour.held_round.wait(PATIENCE_S)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate()
    assert process.returncode == 130
    assert b"interrupted" in stdout
    result = json.loads(out.read_text())
    assert (result["rounds"], result["errors"], result["interrupted"]) == (1, 0, True)
    assert result["attainment"] == {"rounds": 1.0, "sessions": None}


def test_an_attainment_that_is_too_small_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace([session("a", Round(incr_tokens=2, output_tokens=1))], trace)
    with serve(Behaviour()) as url:
        argv = ["replay", str(trace), "--url", url, "--itl", "9", "--fail-under", "0.95", "--ttft"]
        assert main([*argv, "9"]) == 0
        assert main([*argv, "1e-6"]) == 1
    out, err = capsys.readouterr()
    assert out.count("rounds within both targets") == 2
    assert err.splitlines()[-1] == "ampd replay: 0.0% of the rounds met both targets, --fail-under 0.95"


@pytest.mark.parametrize(
    "flags",
    [
        ["--fail-under", "0.9"],
        ["--ttft", "1"],
        ["--url", "localhost:8000"],
        ["--timeout", "1e400"],
        ["--limit", "1" + "0" * 400],
        ["--json", "x" * 400],
        ["--rate", "0"],
        ["--limit", "0"],
        ["--report", "/no/such/folder/r.html"],
        ["--no-such-flag"],
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace([GROWING], trace)
    assert main(["replay", str(trace), *flags]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_malformed_line_stops_before_anything_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("{}\n")
    assert main(["replay", str(trace), "--url", "http://127.0.0.1:1"]) == 2
    assert f"{trace}:1: a session has rounds, this row has none" in capsys.readouterr().err


def test_a_key_that_no_header_can_have_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace([GROWING], trace)
    monkeypatch.setenv("AMPD_API_KEY", "k-123\n")
    assert main(["replay", str(trace), "--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("ampd: AMPD_API_KEY: has a space, a line break")


def test_the_key_is_sent_and_a_password_of_the_url_is_nowhere_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "r.json"
    write_trace([session("a", Round(incr_tokens=2, output_tokens=1))], trace)
    monkeypatch.setenv("AMPD_API_KEY", "k-123")
    behaviour = Behaviour()
    with serve(behaviour) as url:
        assert main(["replay", str(trace), "--url", url]) == 0
        monkeypatch.setenv("AMPD_URL", url.replace("://", "://somebody:hunter2@"))
        assert main(["replay", str(trace), "--json", str(out)]) == 0
        assert main(["replay", str(trace), "--model", "other"]) == 2
    assert behaviour.headers[0]["authorization"] == "Bearer k-123"
    assert behaviour.headers[-1]["authorization"].startswith("Basic "), "a URL with a user wins"
    shown = capsys.readouterr()
    for text in (shown.out, shown.err, out.read_text()):
        assert "hunter2" not in text
        assert "k-123" not in text
