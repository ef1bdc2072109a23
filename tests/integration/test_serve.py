"""The whole graph as a user starts it: `ampd serve`, `ampd replay`, `make demo`, Ctrl-C."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from ampd.keys import MAX_SESSION_ID_CHARS
from tests.harness.graph import profile, session
from tests.harness.listening import is_loopback, listening
from tests.harness.watches import wait_for_watches
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHARED_KEYS = {
    "attainment",
    "ttft_s",
    "ttft_initial_s",
    "ttft_incremental_s",
    "itl_s",
    "e2e_s",
    "routes",
    "rounds",
    "sessions",
    "errors",
    "duration_s",
}


PROCESSES = 5
"""Processes that most of these graphs have."""


class Graph:
    """A running `ampd serve`, the root of a process tree."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = self._wait_ready()
        self.tree = _descendants(process.pid)

    def _wait_ready(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready: "):
                return line.split()[1]
        raise AssertionError(f"the graph did not start: exit code {self.process.wait()}")

    def pid_of(self, *words: str) -> int:
        """The one process of the graph whose command line holds all words."""
        found = [pid for pid in self.tree if all(word in _command(pid) for word in words)]
        assert len(found) == 1, found
        return found[0]


@contextlib.contextmanager
def serving(*flags: str, stderr: IO[str] | None = None) -> Iterator[Graph]:
    argv = [sys.executable, "-m", "ampd", "serve", "--port", "0", *flags]
    wait_for_watches(PROCESSES)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            yield Graph(process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def replay(url: str, out: Path, *flags: str) -> dict[str, object]:
    result = out / "result.json"
    argv = [sys.executable, "-m", "ampd", "replay", "tau-bench-airline", "--url", url, "--json", str(result), *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, object] = json.loads(result.read_text())
    return loaded


def _descendants(root: int) -> list[int]:
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _alive(pids: list[int]) -> list[str]:
    states = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return [f"{pid} {_command(pid)}" for pid, state in states.items() if state != "Z"]


def _wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.05)


def _wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := _alive(pids):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.long
def test_the_modelled_demo_replays_a_real_trace_and_writes_its_report(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tools.demo", "--engine", "modelled", "--out", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "demo.json").read_text())
    assert result.keys() >= SHARED_KEYS
    assert result["errors"] == 0
    assert result["sessions"] == 26
    assert sum(result["routes"].values()) == result["rounds"]
    for words in ("rounds within both targets", "initial", "incremental", "ITL", "prefilled locally", "KV"):
        assert words in done.stdout
    for system in ("AMPD", "always remote", "co-located"):
        assert re.search(rf"^{system} +[\d.]+% +[\d.]+% +[\d,]+ ms +[\d.]+ ms$", done.stdout, re.MULTILINE)
    assert "why: with every prefill on the one prefill worker" in done.stdout
    report = (tmp_path / "demo.html").read_text()
    assert '"name":"always-remote"' in report
    assert not re.search(r'(?:src|href)="(?!data:|#)', report)


@pytest.mark.long
def test_ctrl_c_stops_everything_that_was_started() -> None:
    with serving("--engine", "modelled", "--prefill", "1", "--decode", "2", "--coordinators", "2") as graph:
        assert len(graph.tree) >= 7  # Redis, 3 workers, 2 coordinators, frontend
        graph.process.send_signal(signal.SIGINT)
        assert graph.process.wait(PATIENCE_S) == 0
        _wait_gone(graph.tree)


STEP_S = 0.1
SHORT_DRAIN_S = 5
SECONDS_OF_ROUND = 12
"""A supervisor without consideration for rounds kills their processes after 10 s."""


@contextlib.contextmanager
def round_in_progress(graph: Graph, seconds: int = SECONDS_OF_ROUND) -> Iterator[Iterator[str]]:
    """The lines of a stream that has brought its first token; it has one token per `STEP_S`."""
    body = {"model": "tiny", "prompt": "hello", "ignore_eos": True, "stream": True}
    limit = {"max_tokens": int(seconds / STEP_S)}
    with httpx.stream("POST", f"{graph.url}/v1/completions", json=body | limit, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


@pytest.mark.long
def test_a_round_in_progress_finishes_after_ctrl_c(tmp_path: Path) -> None:
    perf = profile(tmp_path, prefill_s=0.01, long_prefill_s=0.0, step_s=STEP_S)
    with (
        serving("--engine", "modelled", "--prefill", "0", "--perf", str(perf)) as graph,
        round_in_progress(graph) as lines,
    ):
        graph.process.send_signal(signal.SIGINT)
        received = [line for line in lines if line]
        assert received[-1] == "data: [DONE]"
        assert not any("error" in line for line in received)
        assert graph.process.wait(PATIENCE_S) == 0


@pytest.mark.long
def test_a_round_in_progress_has_the_drain_time_after_ctrl_c(tmp_path: Path) -> None:
    """It would take ten minutes. A machine under load can only make the wait longer than `drain_s`."""
    logs, perf = tmp_path / "logs", profile(tmp_path, prefill_s=0.01, long_prefill_s=0.0, step_s=STEP_S)
    flags = ("--engine", "modelled", "--prefill", "0", "--perf", str(perf), "--log-dir", str(logs))
    with (
        serving(*flags, f"--router-args=--drain-s={SHORT_DRAIN_S}") as graph,
        round_in_progress(graph, seconds=600) as lines,
    ):
        since_s = time.monotonic()
        graph.process.send_signal(signal.SIGINT)
        received = [line for line in lines if line]
        assert time.monotonic() - since_s >= SHORT_DRAIN_S
        assert any("error" in line for line in received)
        assert graph.process.wait(PATIENCE_S) == 0
    (log,) = logs.glob("coordinator*.log")
    assert f"rounds still in progress after {SHORT_DRAIN_S} s are given up" in log.read_text()


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    perf = profile(tmp_path, prefill_s=0.01, long_prefill_s=0.0, step_s=STEP_S)
    messages = tmp_path / "messages"
    with (
        messages.open("w") as stderr,
        serving("--engine", "modelled", "--prefill", "0", "--perf", str(perf), stderr=stderr) as graph,
        round_in_progress(graph) as lines,
    ):
        graph.process.send_signal(signal.SIGINT)
        # Two signals of one kind are one to a process that has not handled the first.
        _wait_for(messages, "Ctrl-C again stops at once")
        graph.process.send_signal(signal.SIGINT)
        assert graph.process.wait(PATIENCE_S) == 0
        # The stream breaks off, or ends with an error if the coordinator has ended before the frontend.
        received: list[str] = []
        with contextlib.suppress(httpx.HTTPError):
            received += lines
        assert "data: [DONE]" not in received or any("error" in line for line in received)
        _wait_gone(graph.tree)


@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [
        ("--prefill", "1", "--decode", "1"),
        ("--prefill", "1", "--decode", "1", "--coordinators", "2", "--session-ttl-s", "1e9"),
        ("--workers", "2", "--coordinators", "2", "--no-status-relay"),
    ],
)
def test_every_process_listens_on_loopback_only_and_the_longest_names_and_times_are_taken(
    shape: tuple[str, ...],
) -> None:
    with serving("--engine", "modelled", *shape) as graph:
        body, named = {"model": "tiny", "prompt": "hello", "max_tokens": 4}, session("x" * MAX_SESSION_ID_CHARS)
        httpx.post(f"{graph.url}/v1/completions", json=body, headers=named, timeout=PATIENCE_S).raise_for_status()
        addresses = listening([graph.process.pid, *graph.tree])
        # HTTP, and of each of the three or four other processes metrics and the request plane.
        assert len(addresses) >= 7
        assert [address for address in addresses if not is_loopback(address)] == []


@pytest.mark.long
def test_what_a_frontend_refuses_before_it_costs_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_HTTP_BODY_LIMIT_MB", "1")
    with serving("--engine", "modelled", "--prefill", "0") as graph:
        for text, status in (("word " * 1000, 200), ("word " * 300_000, 413)):
            body = {"model": "tiny", "prompt": text, "max_tokens": 1}
            assert httpx.post(f"{graph.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == status
        threshold = {"model": "tiny", "active_decode_blocks_threshold": 0.0}
        assert httpx.post(f"{graph.url}/busy_threshold", json=threshold, timeout=PATIENCE_S).status_code == 404
        assert httpx.get(f"{graph.url}/busy_threshold", timeout=PATIENCE_S).status_code == 404


def test_nothing_is_left_when_serve_itself_is_killed() -> None:
    with serving("--engine", "modelled") as graph:
        graph.process.kill()
        graph.process.wait(PATIENCE_S)
        _wait_gone(graph.tree)


@pytest.mark.long
def test_the_loss_of_a_worker_is_survived_and_the_loss_of_the_last_one_is_not(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("w") as stderr, serving("--engine", "modelled", "--pools", "static", stderr=stderr) as graph:
        os.kill(graph.pid_of("workers", "--role prefill"), signal.SIGKILL)
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
        assert httpx.post(f"{graph.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
        _wait_for(errors, "prefill-0 ended with exit code -9")
        os.kill(graph.pid_of("workers", "--role decode"), signal.SIGKILL)
        assert graph.process.wait(PATIENCE_S) == 1
        _wait_gone(graph.tree)
    assert "no decode worker is left: decode-1 ended with exit code -9 (Killed" in errors.read_text()


@pytest.mark.long
def test_real_engines_move_kv_both_ways_under_a_real_trace(tmp_path: Path) -> None:
    flags = ["--prefill", "1", "--decode", "1"]
    with serving("--engine", "sglang", "--routing", "always-remote", "--pools", "static", *flags) as graph:
        result = replay(graph.url, tmp_path, "--limit", "2", "--time-scale", "0", "--ttft", "60", "--itl", "60")
        assert result["errors"] == 0
        assert result["routes"] == {"local": 0, "remote": result["rounds"]}
        assert [address for address in listening(graph.tree) if not is_loopback(address)] == []
        moved = result["kv_bytes"]
        assert isinstance(moved, dict)
        assert moved["history"] > 0
        assert moved["increment"] > 0
        assert result["attainment"] == {"rounds": 1.0, "sessions": 1.0}
        _a_session_gets_the_tokens_of_one_engine(graph.url)
        _what_cannot_be_carried_stays_local(graph.url)
        tree = graph.tree
    _wait_gone(tree)


def _a_session_gets_the_tokens_of_one_engine(url: str) -> None:
    """Rounds on both routes read KV in both directions, and give what the decode worker gives alone.

    A penalty keeps a round local, and this one is too small to change anything. A tenant's KV is used by no other.
    """
    stays_local = {"presence_penalty": 1e-9}
    prompt = "The agent reads the file. " * 20
    for number in range(4):
        is_remote = number % 2 == 0
        played, record = _greedy(url, prompt, "two-engines", **({} if is_remote else stays_local))
        alone, reference = _greedy(url, prompt, "one-engine", **stays_local)
        assert record["route"] == ("remote" if is_remote else "local")
        assert reference["reason"] == "cannot-carry-presence-penalty"
        assert played == alone, number
        assert (record["kv_read_tokens_increment"] > 0) == is_remote
        # The prefill worker lacks the round before, which was local.
        assert (record["kv_read_tokens_history"] > 0) == (number == 2)
        assert reference["kv_read_tokens_history"] == reference["kv_read_tokens_increment"] == 0
        prompt += played + "And then the next one. " * 5


def _greedy(url: str, prompt: str, tenant: str, **options: object) -> tuple[str, dict[str, Any]]:
    """The most likely 24 tokens, and the record of the decision; the tenant's rounds are one session."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "nvext": {"extra_fields": ["engine_data"]},
        **options,
    }
    headers = {"x-dynamo-session-id": "the-file", "x-tenant-id": tenant}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["text"], answer["nvext"]["engine_data"]["ampd"]


def _what_cannot_be_carried_stays_local(url: str) -> None:
    """On real engines: a grammar and several choices work where prefills are remote, and say why theirs was not."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    grammar = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}}}
    guided, reason = _chat(url, response_format=grammar)
    assert json.loads(guided[0])["a"] in {"x", "y"}
    assert reason == "cannot-carry-guided-decoding"
    choices, reason = _chat(url, n=2, temperature=1.0)
    assert len(choices) == 2
    assert reason == "cannot-carry-n"
    assert _chat(url)[1] == "always-remote"


def _chat(url: str, **options: object) -> tuple[list[str], str]:
    """The answers, and the reason of the round's route."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 64,
        "nvext": {"extra_fields": ["engine_data"]},
        **options,
    }
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    return texts, answer["nvext"]["engine_data"]["ampd"]["reason"]
