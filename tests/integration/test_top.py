"""`ampd top` on a graph that `ampd serve` started: what it shows is what clients were told."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from ampd.keys import session_key
from tools.demo import ampd_command, running_graph

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = ["--engine", "modelled", "--prefill", "1", "--decode", "2", "--coordinators", "2", "--port", "0"]
POLICIES = [
    "--routing",
    "always-remote",
    "--pools",
    "static",
    "--ttft",
    "60",
    "--itl",
    "60",
    "--router-args=--target-floor=1e-9",
]
ROUNDS, LATE, PENALISED, SESSIONS = 6, 4, 2, 3


def top(environment: dict[str, str], *flags: str) -> str:
    done = subprocess.run(
        [*ampd_command("top"), "--once", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def serve_round(url: str, session: str, **options: object) -> dict[str, Any]:
    """The decision record of a round."""
    extra = {"extra_fields": ["engine_data"], **options.pop("nvext", {})}  # type: ignore[dict-item]
    body = {"model": "tiny", "prompt": "hello " * 20, "max_tokens": 4, "nvext": extra, **options}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers={"x-dynamo-session-id": session}, timeout=60)
    assert reply.status_code == 200, reply.text
    record: dict[str, Any] = reply.json()["nvext"]["engine_data"]["ampd"]
    return record


@pytest.mark.long
def test_top_shows_what_clients_were_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    # a temporary directory of its own: `ampd top` finds this graph there, and no other one
    folder = tmp_path_factory.mktemp("t")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AMPD_")}
    environment |= {"TMPDIR": str(folder), "COLUMNS": "80"}
    flags = [*FLAGS, *POLICIES, "--log-dir", str(folder / "logs")]
    with running_graph(flags, lambda _: None, environment) as url:
        late = {"annotations": ["ttft_target:0.001"]}
        records = [serve_round(url, f"s{number % SESSIONS}") for number in range(ROUNDS)]
        records += [serve_round(url, "s0", nvext=late) for _ in range(LATE)]
        records += [serve_round(url, "s1", presence_penalty=1.0) for _ in range(PENALISED)]
        whole = _until_all_are_told(environment, len(records))
        told = Counter((record["route"], record["reason"]) for record in records)
        assert len(told) > 1
        assert Counter({(row["route"], row["reason"]): row["rounds"] for row in whole["window"]["reasons"]}) == told
        assert sum(whole["window"]["routes"].values()) == len(records)
        _check_window(whole, records)
        _check_who_is_there(whole, records)
        _check_kv(whole, records)
        text = top(environment)
        assert all(len(line) <= 80 for line in text.splitlines())
        for row in whole["workers"]:
            assert any(row["worker_id"][:8] in line and row["role"] in line for line in text.splitlines())
        for word in (
            f"{1 - LATE / len(records):.1%}!",
            "always-remote",
            *(session_key("", name)[:8] for name in ("s0", "s1", "s2")),
        ):
            assert word in text, word


def _until_all_are_told(environment: dict[str, str], rounds: int) -> dict[str, Any]:
    give_up_s = time.monotonic() + 45
    while True:
        whole: dict[str, Any] = json.loads(top(environment, "--json"))
        is_told = whole["window"]["rounds"] == rounds and whole["sessions"]["held"] == SESSIONS
        busy = [row for row in whole["workers"] if row["queue_prefills"]]
        if is_told and not busy and not any(row["rounds_in_progress"] for row in whole["coordinators"]):
            return whole
        assert time.monotonic() < give_up_s, whole


def _check_window(whole: dict[str, Any], records: list[dict[str, Any]]) -> None:
    window = whole["window"]
    in_time = 1 - LATE / len(records)
    assert window["attainment"] == {"rounds": pytest.approx(in_time), "ttft": pytest.approx(in_time), "itl": 1.0}
    assert whole["slo"] == {"ttft_s": 60.0, "itl_s": 60.0}
    assert (window["errors"], window["abandoned"], window["sessions_bound"]) == (0, 0, 3)
    initial_s = [record["ttft_s"] for record in records[:3]]
    others_s = [record["ttft_s"] for record in records[3:]]
    for key, values_s in (("ttft_initial_s", initial_s), ("ttft_incremental_s", others_s)):
        assert window[key]["count"] == len(values_s)
        assert window[key]["mean"] == pytest.approx(sum(values_s) / len(values_s), abs=1e-6)
        assert window[key]["p99"] == pytest.approx(max(values_s), rel=0.011)
    assert window["output_tokens_per_s"] > 0


def _check_who_is_there(whole: dict[str, Any], records: list[dict[str, Any]]) -> None:
    assert whole["notes"] == []
    assert Counter(row["role"] for row in whole["workers"]) == {"prefill": 1, "decode": 2}
    assert len(whole["coordinators"]) == 2
    assert sum(row["rounds"] for row in whole["coordinators"]) == len(records)
    assert {row["routing"] for row in whole["coordinators"]} == {"always-remote"}
    assert all(row["is_state_heard"] and not row["rounds_in_progress"] for row in whole["coordinators"])
    # its own word, not the one that the coordinators wrote beside it
    assert all(row["queue_wait_s"] == 0 and row["kv_capacity_tokens"] > 0 for row in whole["workers"])
    decode = {row["worker_id"] for row in whole["workers"] if row["role"] == "decode"}
    assert {record["decode_worker"] for record in records} <= decode
    homes = {record["session_key"]: record["decode_worker"] for record in records}
    assert whole["sessions"]["held"] == len(homes) == SESSIONS
    assert {(row["session_id"], row["worker_id"]) for row in whole["sessions"]["largest"]} == set(homes.items())


def _check_kv(whole: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """A prefill worker runs nothing but prefills, and their records name the tiers."""
    (row,) = [row for row in whole["workers"] if row["role"] == "prefill"]
    of_it = [record["hit_tokens"] for record in records if record["prefill_worker"] == row["worker_id"]]
    assert row["hit_tokens"] == {tier: sum(hits[tier] for hits in of_it) for tier in row["hit_tokens"]}
    assert sum(row["hit_tokens"].values()) > 0
    for tier, tokens in whole["kv"]["hit_tokens"].items():
        assert tokens == sum(row["hit_tokens"][tier] for row in whole["workers"])
    assert whole["kv"]["store_capacity_tokens"] > whole["kv"]["store_used_tokens"] > 0


def test_without_a_graph_it_is_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "AMPD_STATE_URL": "redis://127.0.0.1:1/0"}
    argv = [sys.executable, "-m", "ampd", "top"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
