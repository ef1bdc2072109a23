"""`ampd replay` against a real HTTP server with set timings: prompts, headers, times and results."""

from __future__ import annotations

import re

import pytest

from tests.workloads.conftest import Replay
from workloads.trace import Round

from .lab import GROWING, session

SHARED_KEYS = {
    "attainment": {"rounds", "sessions"},
    "ttft_s": {"mean", "p50", "p95", "p99"},
    "ttft_initial_s": {"mean", "p50", "p95", "p99"},
    "ttft_incremental_s": {"mean", "p50", "p95", "p99"},
    "itl_s": {"mean", "p50", "p95", "p99"},
    "mean_itl_s": {"mean", "p50", "p95", "p99"},
    "e2e_s": {"mean", "p50", "p95", "p99"},
    "routes": {"local", "remote"},
    "kv_bytes": {"history", "increment"},
}


def test_prompts_extend_exactly_what_the_server_generated(replay: Replay) -> None:
    code, result = replay(GROWING)
    assert code == 0
    rounds = replay.behaviour.rounds
    first, second, third = (body["prompt"] for body in rounds)
    outputs = replay.behaviour.outputs[-3:]
    assert len(first) == 30
    assert second[:34] == first + outputs[0]
    assert len(second) == 44
    assert third[:20] == second[:20]
    assert len(third) == 25
    assert [body["max_tokens"] for body in rounds] == [4, 3, 2]
    assert all(body["ignore_eos"] for body in rounds)
    assert [(row["hist_tokens"], row["incr_tokens"], row["output_tokens"]) for row in result["records"]] == [
        (0, 30, 4),
        (34, 10, 3),
        (20, 5, 2),
    ]


def test_session_headers_are_unique_to_the_run_and_mark_the_last_round(replay: Replay) -> None:
    for _ in range(2):
        replay(GROWING)
    sent = [headers for headers in replay.behaviour.headers if "x-dynamo-session-id" in headers]
    assert ["x-dynamo-session-final" in headers for headers in sent] == [False, False, True] * 2
    assert len({headers["x-dynamo-session-id"] for headers in sent}) == 2


def test_the_same_seed_gives_the_same_prompts(replay: Replay) -> None:
    for seed in ("1", "1", "2"):
        replay(GROWING, flags=("--seed", seed))
    record, again, other = (body["prompt"] for body in replay.behaviour.rounds[::3])
    assert record == again != other


@pytest.mark.slow
def test_times_gaps_and_attainment(replay: Replay) -> None:
    behaviour = replay.behaviour
    behaviour.session_first_s, behaviour.gap_s, behaviour.tokens_per_chunk = 0.1, 0.06, 3
    only = session("a", Round(incr_tokens=3, output_tokens=7))
    _, result = replay(only, flags=("--ttft", "30", "--itl", "20"))
    _, missed = replay(only, flags=("--ttft", "0.05", "--itl", "20"))
    (record,) = result["records"]
    # Chunks of 3, 3 and 1 tokens, 60 ms apart: the first chunk's tokens have no gap, the others share theirs.
    assert record["ttft_s"] >= 0.1
    # The whole round, because a busy client may read the first chunk late, and the gaps then look shorter.
    assert record["e2e_s"] >= 0.1 + 2 * 0.06
    assert record["e2e_s"] > record["ttft_s"]
    assert record["itl_s"] == pytest.approx((record["e2e_s"] - record["ttft_s"]) / 6)
    assert record["output_tokens"] == 7
    assert result["attainment"] == {"rounds": 1.0, "sessions": 1.0}
    assert missed["attainment"] == {"rounds": 0.0, "sessions": 0.0}
    for key, inner in SHARED_KEYS.items():
        assert set(result[key]) == inner
    assert (result["rounds"], result["sessions"], result["errors"]) == (1, 1, 0)
    assert result["duration_s"] > 0


def test_the_slo_travels_in_milliseconds(replay: Replay) -> None:
    replay(GROWING, flags=("--ttft", "0.35", "--itl", "0.04"))
    nvext = replay.behaviour.rounds[0]["nvext"]
    assert nvext["router"] == {"ttft_target": 350.0, "itl_target": 40.0}
    assert nvext["annotations"] == ["ttft_target:350.0", "itl_target:40.0"]


def test_tool_gaps_and_arrivals_scale(replay: Replay) -> None:
    rounds = (Round(incr_tokens=2, output_tokens=1), Round(incr_tokens=2, output_tokens=1, tool_s=20.0))
    _, result = replay(session("a", *rounds), session("b", *rounds, arrival_s=10.0), flags=("--time-scale", "0.01"))
    sent = {(row["session_id"], row["round"]): row["sent_s"] for row in result["records"]}
    assert sent["b", 0] >= 0.1
    assert sent["a", 1] - sent["a", 0] >= 0.2
    # Open loop: b arrives while a runs its tool.
    assert sent["b", 0] < sent["a", 1]


def test_a_concurrency_cap_makes_sessions_late(replay: Replay) -> None:
    replay.behaviour.session_first_s = 0.1
    sessions = [session(name, Round(incr_tokens=2, output_tokens=1)) for name in "ab"]
    _, result = replay(*sessions, flags=("--concurrency", "1"))
    assert result["client_lag_max_s"] >= 0.1


@pytest.mark.slow
def test_decision_records_are_collected(replay: Replay) -> None:
    decision = {
        "route": "remote",
        "reason": "ttft-slack",
        "kv_read_bytes_history": 4096,
        "kv_read_bytes_increment": 1000,
        "estimates": [],
    }
    replay.behaviour.decision = decision
    report = replay.folder / "r.html"
    _, result = replay(GROWING, flags=("--report", str(report)))
    assert result["routes"] == {"local": 0, "remote": 3}
    assert result["kv_bytes"] == {"history": 3 * 4096, "increment": 3000}
    assert result["records"][0]["decision"] == decision
    assert re.search(r"prefilled locally +0\.0%", result["stdout"])
    assert "ttft-slack" in report.read_text()


@pytest.mark.slow
def test_a_round_without_end_times_out(replay: Replay) -> None:
    replay.behaviour.session_first_s = 60.0
    code, result = replay(GROWING, flags=("--timeout", "1"))
    assert code == 1
    assert "no end after 1 s" in result["records"][0]["error"]


def test_the_factor_of_the_prompts_tokens_is_named(replay: Replay) -> None:
    _, result = replay(GROWING)
    assert result["prompt_tokens"] == {"trace": 30 + 44 + 25, "server": 3 * 7}
    (line,) = [line for line in result["stdout"].splitlines() if "tokens" in line and "prompt" in line]
    assert "0.21 times the trace's" in line
