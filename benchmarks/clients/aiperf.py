"""AIPerf with its default settings: each conversation is a session, and its figures agree with the graph's own.

AIPerf is a program and not a package to import. It pins versions that would make other clients old ones, so that it has
an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampd.telemetry.metrics import names
from benchmarks.clients.environment import aiperf_program, ask_sessions
from benchmarks.clients.table import Row
from benchmarks.metrics_agreement import Scraped, scrape

CLIENT = "AIPerf"
CONVERSATIONS, TURNS, OUTPUT_TOKENS = 12, 5, 40
_RESULT = "profile_export_aiperf.json"
_TIMEOUT_S = 600.0
_WORDS = "The agent looks at row {turn} of table {conversation} and asks which tool may change it next. "
_TTFT_MARGIN_MS, _ITL_MARGIN_MS, _MARGIN_SHARE = 30.0, 3.0, 0.3
"""The client's figures include the way there and back, and on few cores the client's own wait for one of them."""


def conversations() -> str:
    """A file of conversations as AIPerf reads it, each with words of its own, so that no two share a prompt."""
    rows = (
        {
            "session_id": f"conversation-{number}",
            "turns": [{"text": _WORDS.format(turn=turn, conversation=number) * 3} for turn in range(TURNS)],
        }
        for number in range(CONVERSATIONS)
    )
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def command(program: str, url: str, model: str, file: str) -> list[str]:
    """The command of docs/clients.md.

    Args:
        model: the model folder, which has the tokenizer.
        file: the conversations.
    """
    return [
        *(program, "profile", "--model", "tiny", "--url", url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", model, "--input-file", file, "--custom-dataset-type", "multi_turn"),
        *("--conversation-num", str(CONVERSATIONS), "--concurrency", "4"),
        *("--output-tokens-mean", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"),
    ]


def run(program: str, url: str, model: Path, folder: Path) -> dict[str, Any]:
    """Run AIPerf, and give its own result.

    Args:
        folder: for its files.

    Raises:
        AssertionError: AIPerf failed, or some of its requests did.
    """
    file = folder / "conversations.jsonl"
    file.write_text(conversations(), encoding="utf-8")
    # Offline, AIPerf looks for a tokenizer in its cache only.
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")}
    done = subprocess.run(
        command(program, url, str(model), str(file)),
        cwd=folder,
        env={**environment, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    said = " ".join(f"{done.stdout[-1000:]} {done.stderr[-1000:]}".split())
    assert done.returncode == 0, f"exit code {done.returncode}: {said}"
    results = sorted(folder.glob(f"artifacts/*/{_RESULT}"))
    assert results, f"no {_RESULT}: {said}"
    result: dict[str, Any] = json.loads(results[-1].read_text(encoding="utf-8"))
    answered = result["request_count"]["avg"]
    assert answered == CONVERSATIONS * TURNS, f"{answered:.0f} of {CONVERSATIONS * TURNS} requests were answered"
    return result


def rows(url: str, log_dir: Path, model: Path, folder: Path) -> list[Row]:
    """The rows of the table; none without AIPerf.

    Args:
        log_dir: of the graph.
        folder: for AIPerf's files.
    """
    program = aiperf_program()
    if program is None:
        return []
    feature = f"{CONVERSATIONS} conversations of {TURNS} turns, with default headers"
    known, before = _epochs(url), scrape(log_dir)
    try:
        result = run(program, url, model, folder)
    except AssertionError as failure:
        return [Row(CLIENT, feature, "60 sessions, one per turn", str(failure))]
    epochs = {key: epoch for key, epoch in _epochs(url).items() if key not in known}
    since = scrape(log_dir).since(before)
    unnamed = since.total(names.ROUNDS_UNNAMED)
    error = (
        ""
        if set(epochs.values()) == {1} and len(epochs) == CONVERSATIONS and not unnamed
        else (f"{len(epochs)} sessions, {unnamed:.0f} rounds without one, {sum(epochs.values()) - len(epochs)} moves")
    )
    return [
        Row(CLIENT, feature, "60 sessions, one per turn", error, is_session=not error),
        compared(result, since),
    ]


def compared(result: Mapping[str, Any], since: Scraped) -> Row:
    """AIPerf's mean TTFT and ITL beside those of the coordinators."""
    theirs = [result[name]["avg"] for name in ("time_to_first_token", "inter_token_latency")]
    ours = [since.mean(metric) * 1e3 for metric in (names.TTFT, names.ITL)]
    figures = ", ".join(
        f"{name} {client:.1f} and {graph:.1f} ms"
        for name, client, graph in zip(("TTFT", "ITL"), theirs, ours, strict=True)
    )
    margins = (_TTFT_MARGIN_MS, _ITL_MARGIN_MS)
    agree = all(
        abs(client - graph) <= max(margin, _MARGIN_SHARE * graph)
        for client, graph, margin in zip(theirs, ours, margins, strict=True)
    )
    feature = "its mean TTFT and ITL are those of `/metrics`"
    return Row(CLIENT, feature, "", "" if agree else f"they differ: {figures}", figures=figures)


def _epochs(url: str) -> dict[str, int]:
    """Session -> how many decode workers it was bound to so far, for all sessions whose KV a worker holds."""
    listed = ask_sessions(url, "list")["sessions"]
    shown = {row["session_key"]: ask_sessions(url, "show", session_key=row["session_key"]) for row in listed}
    return {key: (answer.get("binding") or {}).get("epoch", 0) for key, answer in shown.items()}
