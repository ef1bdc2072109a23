"""tau-bench: a round per message of the assistant."""

from __future__ import annotations

import json
from pathlib import Path

from .lab import load, say, shape


def test_tau_bench_makes_a_round_of_every_assistant_message(tmp_path: Path) -> None:
    run = {
        "task_id": 3,
        "trial": 1,
        "traj": [
            say("system", "policy text"),
            say("user", "hello there"),
            say("assistant", None, tool_calls=[{"function": {"name": "get", "arguments": "{}"}}]),
            say("tool", "a b c"),
            say("assistant", "bye"),
        ],
    }
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([run]))
    (session,) = load("tau_bench", path)
    assert session.session_id == "3-1"
    assert session.shared_prefix is not None
    assert session.shared_prefix.tokens == 2 + 4
    assert shape(session) == [(2 + 2 + 8 + 3, 2 + 1, 0.0, None), (3 + 4 + 3, 1 + 1, 0.0, None)]
