"""Mooncake: sessions by blocks of the prompt, their increments, delays, and waits for tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workloads.formats import detect

from .lab import NOTES, jsonl, load, shape


def _moon(session: str | None, prompt: int, out: int, blocks: list[int], **more: Any) -> dict[str, Any]:
    row = {"input_length": prompt, "output_length": out, "hash_ids": blocks, **more}
    return row if session is None else {"session_id": session, **row}


def test_mooncake_sessions(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "m.jsonl",
        _moon("a", 1000, 50, [1, 2], timestamp=2000),
        _moon(None, 100, 5, [9], timestamp=2500),
        _moon("a", 1600, 50, [1, 3, 4, 5], delay=700),
        _moon("a", 1500, 10, [1, 6, 7], delay=100),
    )
    session, single = load("mooncake", path)
    assert session.arrival_s == 0.0
    assert shape(session) == [(1000, 50, 0.0, None), (550, 50, 0.7, None), (988, 10, 0.1, 512)]
    assert (single.arrival_s, shape(single)) == (0.5, [(100, 5, 0.0, None)])


def test_mooncake_delta_adds_up(tmp_path: Path) -> None:
    rows = (_moon("a", 1000, 50, [], timestamp=0), _moon("a", 30, 5, [], delay=1500))
    (session,) = load("mooncake-delta", jsonl(tmp_path / "m.jsonl", *rows))
    assert shape(session) == [(1000, 50, 0.0, None), (30, 5, 1.5, None)]


def test_agentic_mooncake_adds_delay_and_tool_wait(tmp_path: Path) -> None:
    rows = (
        _moon("a", 600, 10, [1, 2], request_id="r1", timestamp=0, prefix_reset=True),
        _moon("a", 700, 10, [1, 3], request_id="r2", timestamp=900, wait_for=["r1"], delay=100, tool_wait_ms=200),
        _moon("a", 800, 10, [], request_id="r3", timestamp=999, wait_for=["r2"], delay=50, prefix_reset=True),
    )
    (session,) = load("agentic_mooncake", jsonl(tmp_path / "m.jsonl", *rows))
    assert shape(session) == [(600, 10, 0.0, None), (90, 10, pytest.approx(0.3), None), (800, 10, 0.05, 0)]


def test_rows_that_look_like_deltas_bring_a_hint(tmp_path: Path) -> None:
    deltas = [{"session_id": "s", "input_length": n, "output_length": 5, "delay": 0} for n in (900, 40, 30, 60)]
    load("mooncake", jsonl(tmp_path / "d.jsonl", *deltas))
    (note,) = NOTES
    assert "2 of 3 later rounds" in note
    assert "mooncake-delta" in note
    growing = [{"session_id": "s", "input_length": n, "output_length": 30, "delay": 0} for n in (500, 41, 42, 43, 44)]
    load("mooncake", jsonl(tmp_path / "g.jsonl", *growing))
    (note,) = NOTES
    assert "4 of 4 later rounds" in note
    hashed = [_moon("s", n, 5, [10 * n], delay=0) for n in (900, 40, 30, 60)]
    load("mooncake", jsonl(tmp_path / "h.jsonl", *hashed))
    (note,) = NOTES
    assert "2 of 3 later rounds" in note
    kept = [_moon("s", n, 5, [1, n], delay=0) for n in (1024, 900, 800)]
    load("mooncake", jsonl(tmp_path / "k.jsonl", *kept))
    assert not NOTES
    whole = [{"session_id": "s", "input_length": n, "output_length": 5, "delay": 0} for n in (900, 940, 970)]
    load("mooncake", jsonl(tmp_path / "w.jsonl", *whole))
    assert not NOTES


def _shared(path: Path, format_name: str) -> dict[str, tuple[str, int] | None]:
    """The name and the tokens of each session's shared prefix."""
    return {
        session.session_id: (prefix.id, prefix.tokens) if (prefix := session.shared_prefix) else None
        for session in load(format_name, path)
    }


@pytest.mark.parametrize("format_name", ["mooncake", "mooncake-delta"])
def test_sessions_share_the_blocks_that_all_with_the_same_first_block_begin_with(
    tmp_path: Path, format_name: str
) -> None:
    first = {"a": [1, 2, 3, 4], "b": [1, 2, 3, 5], "c": [1, 2, 9, 10], "alone": [7, 8], "d": [6], "e": [6]}
    rows = [_moon(name, 512 * len(ids) - 100, 5, ids, timestamp=0) for name, ids in first.items()]
    assert _shared(jsonl(tmp_path / "m.jsonl", *rows), format_name) == {
        **dict.fromkeys("abc", ("block-1", 1024)),
        "alone": None,
        **dict.fromkeys("de", ("block-6", 412)),
    }


@pytest.mark.parametrize("format_name", ["mooncake", "mooncake-delta"])
def test_a_prompt_within_the_shared_blocks_leaves_them_to_the_longer_ones(tmp_path: Path, format_name: str) -> None:
    prompts = {"partial": (700, [1, 9]), "full": (1024, [1, 2]), "x": (2048, [1, 2, 3, 4]), "y": (1900, [1, 2, 3, 5])}
    rows = [_moon(name, prompt, 5, ids, timestamp=0) for name, (prompt, ids) in prompts.items()]
    shared = {"partial": 512, "full": 1024, "x": 1536, "y": 1536}
    assert _shared(jsonl(tmp_path / "m.jsonl", *rows), format_name) == {
        name: ("block-1", tokens) for name, tokens in shared.items()
    }
    pair = [row for row in rows if row["session_id"] in ("full", "x")]
    assert _shared(jsonl(tmp_path / "p.jsonl", *pair), format_name) == dict.fromkeys(("full", "x"), ("block-1", 1024))


@pytest.mark.parametrize("later", [[8], [1, 2, 8], [], None])
def test_only_the_first_rows_of_deltas_tell_what_is_shared(tmp_path: Path, later: list[int] | None) -> None:
    """Later rows have the blocks of the increment, or of the whole prompt, or none."""
    rows = [
        {"session_id": name, "input_length": tokens, "output_length": 5, "hash_ids": ids, **times}
        for name, own in (("a", 3), ("b", 4))
        for tokens, ids, times in ((1100, [1, 2, own], {"timestamp": 0}), (30, later, {"delay": 100}))
    ]
    path = jsonl(tmp_path / "m.jsonl", *rows)
    assert _shared(path, "mooncake-delta") == dict.fromkeys("ab", ("block-1", 1024))
    assert shape(load("mooncake-delta", path)[0]) == [(1100, 5, 0.0, None), (30, 5, 0.1, None)]
    assert _shared(jsonl(tmp_path / "one.jsonl", *rows[:2]), "mooncake-delta") == {"a": None}


def test_the_lengths_of_the_prompts_tell_the_size_of_their_blocks(tmp_path: Path) -> None:
    rows = [_moon("a", 100, 5, list(range(7)), timestamp=0), _moon("a", 130, 5, [0, 1, 2, 9, 9, 9, 9, 9, 9], delay=100)]
    (session,) = load("mooncake", jsonl(tmp_path / "m.jsonl", *rows))
    assert shape(session) == [(100, 5, 0.0, None), (82, 5, 0.1, 48)]
    assert [note.partition(": ")[2] for note in NOTES] == [
        "the blocks of hash_ids have 16 tokens, by the lengths of the prompts"
    ]
    load("mooncake", jsonl(tmp_path / "x.jsonl", *(_moon(None, 40000, 5, [1], timestamp=0) for _ in "ab")))
    assert "hash_ids fit no size of blocks in 2 of 2 rows; 512 tokens are assumed" in NOTES[0]

    rows = [_moon(None, tokens, 5, list(range(hashes)), timestamp=0) for tokens, hashes in ((1000, 10), (1001, 11))]
    load("mooncake", jsonl(tmp_path / "y.jsonl", *rows))
    assert "the blocks of hash_ids have 100 tokens" in NOTES[0]


def test_rows_without_lengths_have_them_from_blocks_and_text(tmp_path: Path) -> None:
    """As AIPerf's custom data sets may be: `text_input` or `messages` for `input_length`, no `output_length`."""
    rows = [
        {"timestamp": 0, "hash_ids": [1, 2], "output_length": 7},
        {"timestamp": 1000, "text_input": "one two three", "output_length": 9},
        {"timestamp": 2000, "messages": [{"role": "user", "content": "one two"}], "output_length": 11},
        {"timestamp": 3000, "input_length": 600, "hash_ids": [1, 3]},
    ]
    sessions = load("mooncake", jsonl(tmp_path / "m.jsonl", *rows))
    assert [shape(session)[0][:2] for session in sessions] == [(1024, 7), (3 + 4 + 3, 9), (2 + 4 + 3, 11), (600, 9)]
    assert len(NOTES) == 1
    assert "1 requests do not say how long their answer is; 9 tokens (the median of the others)" in NOTES[0]


def test_newest_rows_may_come_first(tmp_path: Path) -> None:
    rows = [_moon("a", 30, 5, [], timestamp=1500), _moon("a", 1000, 50, [7, 8], timestamp=0)]
    (session,) = load("mooncake-delta", jsonl(tmp_path / "m.jsonl", *rows))
    assert shape(session) == [(1000, 50, 0.0, None), (30, 5, 1.5, None)]


def test_texts_that_do_not_repeat_what_is_before_them_are_deltas(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "timestamp": at, "text_input": text, "output_length": 5}
        for at, text in enumerate(("one two", "three"))
    ]
    path = jsonl(tmp_path / "m.jsonl", *rows)
    assert detect(path)[0] == "mooncake-delta"
    assert shape(load("mooncake-delta", path)[0]) == [(2 + 4 + 3, 5, 0.0, None), (1 + 4 + 3, 5, 0.001, None)]
