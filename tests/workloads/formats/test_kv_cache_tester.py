"""kv-cache-tester: rewrites of the context and sub-agents."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from .lab import jsonl, load, shape


def _request(prompt: int, out: int, blocks: list[int], t: float, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": prompt, "out": out, "hash_ids": blocks, "api_time": 1.0, **more}


def test_a_corpus_has_a_trace_per_line(tmp_path: Path) -> None:
    requests = [_request(200, 20, [1, 2, 3], 0.0), _request(330, 30, [1, 2, 3, 4, 5], 6.0, think_time=4.0)]
    rows = [{"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests} for name in ("a", "b")]
    sessions = load("kv-cache-tester", jsonl(tmp_path / "corpus.jsonl", *rows))
    assert [session.session_id for session in sessions] == ["a", "b"]
    assert [shape(session) for session in sessions] == [[(200, 20, 0.0, None), (110, 30, 4.0, None)]] * 2
    # Hashes of one trace say nothing about another.
    assert [session.shared_prefix for session in sessions] == [None, None]


def test_kv_cache_tester_keeps_rewrites_and_sub_agents(tmp_path: Path) -> None:
    trace = {
        "id": "x",
        "block_size": 10,
        "requests": [
            _request(35, 5, [1, 2, 3], 0.0, think_time=0.0),
            _request(60, 5, [1, 2, 3, 4, 5, 6], 4.0, think_time=3.0),  # extends 35 + 5
            _request(62, 5, [1, 2, 3, 4, 5, 6], 9.0),  # longer, but the output (5) is gone
            _request(100, 5, [1, 2, 9, 9, 9, 9, 9, 9, 9, 9], 11.0, think_time=0.5),  # diverges after two blocks
            _request(40, 5, [1, 2, 9, 9], 20.0, think_time=0.5),  # shrinks
            {"t": 2.0, "type": "subagent", "requests": [_request(20, 2, [7, 8], 0.5)]},
        ],
    }
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    session, agent = load("kv-cache-tester", path)
    assert shape(session) == [
        (35, 5, 0.0, None),
        (20, 5, 3.0, None),
        (2, 5, 4.0, 60),
        (80, 5, 0.5, 20),
        (1, 5, 0.5, 39),
    ]
    assert (agent.session_id, agent.arrival_s, shape(agent)) == ("x/agent1", 2.0, [(20, 2, 0.0, None)])
