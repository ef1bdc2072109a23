"""The replay against a real HTTP server with set timings: prompts, headers, times, failures and results."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main
from workloads.trace import Round, Session, write_trace

sys.path.insert(0, str(Path(__file__).parent))
from openai_server import Behaviour, serve

SHARED_KEYS = {
    "attainment": {"rounds", "sessions"},
    "ttft_s": {"mean", "p50", "p95", "p99"},
    "ttft_initial_s": {"mean", "p50", "p95", "p99"},
    "ttft_incremental_s": {"mean", "p50", "p95", "p99"},
    "itl_s": {"mean", "p50", "p95", "p99"},
    "e2e_s": {"mean", "p50", "p95", "p99"},
    "routes": {"local", "remote"},
    "kv_bytes": {"history", "increment"},
}


def _session(name: str, *rounds: Round, arrival_s: float = 0.0) -> Session:
    return Session(session_id=name, arrival_s=arrival_s, rounds=rounds)


GROWING = _session(
    "a",
    Round(incr_tokens=30, output_tokens=4),
    Round(incr_tokens=10, output_tokens=3),
    Round(incr_tokens=5, output_tokens=2, keep_tokens=20),
)


async def _replay(tmp_path: Path, url: str, sessions: list[Session], *flags: str) -> tuple[int, dict[str, Any]]:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "result.json"
    out.unlink(missing_ok=True)
    write_trace(sessions, trace)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ampd", "replay", str(trace), "--url", url, "--json", str(out), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    assert b"Traceback" not in stderr, stderr.decode()
    result = json.loads(out.read_text()) if out.exists() else {}
    return process.returncode or 0, result | {"stdout": stdout.decode(), "stderr": stderr.decode()}


async def test_prompts_extend_exactly_what_the_server_generated(tmp_path: Path) -> None:
    behaviour = Behaviour()
    async with serve(behaviour) as url:
        code, result = await _replay(tmp_path, url, [GROWING])
    assert code == 0
    first, second, third = (body["prompt"] for body in behaviour.rounds)
    outputs = behaviour.outputs[-3:]
    assert len(first) == 30
    assert second[:34] == first + outputs[0]
    assert len(second) == 44
    assert third[:20] == second[:20]
    assert len(third) == 25
    assert [body["max_tokens"] for body in behaviour.rounds] == [4, 3, 2]
    assert all(body["ignore_eos"] for body in behaviour.rounds)
    assert [(row["hist_tokens"], row["incr_tokens"], row["output_tokens"]) for row in result["records"]] == [
        (0, 30, 4),
        (34, 10, 3),
        (20, 5, 2),
    ]


async def test_session_headers_are_unique_to_the_run_and_mark_the_last_round(tmp_path: Path) -> None:
    behaviour = Behaviour()
    async with serve(behaviour) as url:
        for _ in range(2):
            await _replay(tmp_path, url, [GROWING])
    sent = [headers for headers in behaviour.headers if "x-dynamo-session-id" in headers]
    assert ["x-dynamo-session-final" in headers for headers in sent] == [False, False, True] * 2
    assert len({headers["x-dynamo-session-id"] for headers in sent}) == 2


async def test_the_same_seed_gives_the_same_prompts(tmp_path: Path) -> None:
    behaviour = Behaviour()
    async with serve(behaviour) as url:
        for seed in ("1", "1", "2"):
            await _replay(tmp_path, url, [GROWING], "--seed", seed)
    record, again, other = (body["prompt"] for body in behaviour.rounds[::3])
    assert record == again != other


async def test_times_gaps_and_attainment(tmp_path: Path) -> None:
    behaviour = Behaviour(first_s=0.1, gap_s=0.06, tokens_per_chunk=3)
    async with serve(behaviour) as url:
        sessions = [_session("a", Round(incr_tokens=3, output_tokens=7))]
        _, result = await _replay(tmp_path, url, sessions, "--ttft", "30", "--itl", "20")
        _, missed = await _replay(tmp_path, url, sessions, "--ttft", "0.05", "--itl", "20")
    (record,) = result["records"]
    # Chunks of 3, 3 and 1 tokens, 60 ms apart: the first chunk's tokens have no gap, the others share theirs.
    assert record["ttft_s"] >= 0.1
    assert record["e2e_s"] - record["ttft_s"] >= 0.12
    assert record["itl_s"] == pytest.approx((record["e2e_s"] - record["ttft_s"]) / 6)
    assert record["output_tokens"] == 7
    assert result["attainment"] == {"rounds": 1.0, "sessions": 1.0}
    assert missed["attainment"] == {"rounds": 0.0, "sessions": 0.0}
    for key, inner in SHARED_KEYS.items():
        assert set(result[key]) == inner
    assert (result["rounds"], result["sessions"], result["errors"]) == (1, 1, 0)
    assert result["duration_s"] > 0


async def test_the_slo_travels_in_milliseconds(tmp_path: Path) -> None:
    behaviour = Behaviour()
    async with serve(behaviour) as url:
        await _replay(tmp_path, url, [GROWING], "--ttft", "0.35", "--itl", "0.04")
    assert behaviour.rounds[0]["nvext"]["router"] == {"ttft_target": 350.0, "itl_target": 40.0}
    assert behaviour.rounds[0]["nvext"]["annotations"] == ["ttft_target:350.0", "itl_target:40.0"]


async def test_tool_gaps_and_arrivals_scale(tmp_path: Path) -> None:
    rounds = (Round(incr_tokens=2, output_tokens=1), Round(incr_tokens=2, output_tokens=1, tool_s=20.0))
    sessions = [_session("a", *rounds), _session("b", *rounds, arrival_s=10.0)]
    async with serve(Behaviour()) as url:
        _, result = await _replay(tmp_path, url, sessions, "--time-scale", "0.01")
    sent = {(row["session_id"], row["round"]): row["sent_s"] for row in result["records"]}
    assert sent["b", 0] >= 0.1
    assert sent["a", 1] - sent["a", 0] >= 0.2
    # Open loop: b arrives while a runs its tool.
    assert sent["b", 0] < sent["a", 1]


async def test_a_concurrency_cap_makes_sessions_late(tmp_path: Path) -> None:
    behaviour = Behaviour(first_s=0.2)
    sessions = [_session(name, Round(incr_tokens=2, output_tokens=1)) for name in "ab"]
    async with serve(behaviour) as url:
        _, result = await _replay(tmp_path, url, sessions, "--concurrency", "1")
    assert result["client_lag_max_s"] >= 0.2


async def test_decision_records_are_collected(tmp_path: Path) -> None:
    decision = {
        "route": "remote",
        "reason": "ttft-slack",
        "kv_read_bytes_history": 4096,
        "kv_read_bytes_increment": 1000,
        "estimates": [],
    }
    async with serve(Behaviour(decision=decision)) as url:
        _, result = await _replay(tmp_path, url, [GROWING], "--report", str(tmp_path / "r.html"))
    assert result["routes"] == {"local": 0, "remote": 3}
    assert result["kv_bytes"] == {"history": 3 * 4096, "increment": 3000}
    assert result["records"][0]["decision"] == decision
    assert "3 remote (100%)" in result["stdout"]
    assert "ttft-slack" in (tmp_path / "r.html").read_text()


async def test_endpoints_without_extensions_get_plain_chat(tmp_path: Path) -> None:
    behaviour = Behaviour(dynamo=False, completions=False, accepts_ignore_eos=False)
    async with serve(behaviour) as url:
        code, result = await _replay(tmp_path, url, [GROWING])
    assert code == 0
    first, second, _ = behaviour.rounds
    assert not {"nvext", "ignore_eos", "return_token_ids"} & set(first)
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    answer = "".join(f" t{item}" for item in behaviour.outputs[-3])
    assert second["messages"][1]["content"] == answer
    assert len(first["messages"][0]["content"].split()) == 30
    assert result["routes"] == {"local": 0, "remote": 0}
    assert result["kv_bytes"] == {"history": None, "increment": None}


async def test_real_words_are_sent_as_chat(tmp_path: Path) -> None:
    behaviour = Behaviour()
    async with serve(behaviour) as url:
        await _replay(tmp_path, url, [_session("a", Round(incr_tokens=2, output_tokens=1, text="guten Tag"))])
    assert behaviour.rounds[0]["messages"] == [{"role": "user", "content": "guten Tag"}]


@pytest.mark.parametrize("broken", [{"status": 503}, {"fail_after_chunks": 1}])
async def test_server_errors_are_counted_and_shown(tmp_path: Path, broken: dict[str, Any]) -> None:
    behaviour = Behaviour(**broken)
    sessions = [GROWING] if "status" in broken else [_session("a", *GROWING.rounds[:2])]
    async with serve(behaviour) as url:
        code, result = await _replay(tmp_path, url, sessions, "--ttft", "9", "--itl", "9")
    message = "no live decode worker" if "status" in broken else "worker died"
    assert code == 1
    assert (result["errors"], result["rounds"], result["sessions"]) == (1, 0, 1)
    assert message in result["records"][0]["error"]
    assert message in result["stdout"]
    # The rounds that were never sent count as missed.
    assert result["attainment"] == {"rounds": 0.0, "sessions": 0.0}


async def test_a_round_without_end_times_out(tmp_path: Path) -> None:
    async with serve(Behaviour(session_first_s=60.0)) as url:
        code, result = await _replay(tmp_path, url, [GROWING], "--timeout", "1")
    assert code == 1
    assert "no end after 1 s" in result["records"][0]["error"]


async def test_an_interrupt_prints_the_partial_result(tmp_path: Path) -> None:
    behaviour = Behaviour()
    sessions = [_session("a", Round(incr_tokens=2, output_tokens=1), Round(incr_tokens=2, output_tokens=1, tool_s=900))]
    trace, out = tmp_path / "t.jsonl", tmp_path / "r.json"
    write_trace(sessions, trace)
    async with serve(behaviour) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ampd", "replay", str(trace), "--url", url, "--json", str(out)),
            *("--ttft", "9", "--itl", "9"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await behaviour.round_done.wait()
        await asyncio.sleep(0.3)  # for the client to read the end of the stream
        os.kill(process.pid, signal.SIGINT)
        stdout, _ = await process.communicate()
    assert process.returncode == 130
    assert b"interrupted" in stdout
    result = json.loads(out.read_text())
    assert (result["rounds"], result["errors"], result["interrupted"]) == (1, 0, True)
    assert result["attainment"] == {"rounds": 1.0, "sessions": None}


def test_a_url_that_does_not_answer_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace([GROWING], trace)
    with socket.socket() as listener:
        # Listens, never answers: the connection is made and nothing comes.
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["replay", str(trace), "--url", silent]) == 2
    assert main(["replay", str(trace), "--url", silent]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert all("does not answer" in line for line in lines)


@pytest.mark.parametrize(
    "flags",
    [
        ["--ttft", "1"],
        ["--url", "localhost:8000"],
        ["--token-ids", "9"],
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
    assert f"{trace}:1: session_id is missing" in capsys.readouterr().err
