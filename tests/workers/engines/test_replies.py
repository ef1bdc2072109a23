"""Files of scripted replies."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from ampd.keys import branch_key, session_key
from workers.engines.replies import Replies


def _read(folder: Path, *lines: Any) -> Replies:
    path = folder / "replies.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return Replies.read(path)


def test_a_session_with_lines_of_its_own_has_only_those(tmp_path: Path) -> None:
    replies = _read(tmp_path, {"content": "a"}, {"session": "s", "text": "b"}, "", {"content": "c"})

    def found(session: str, turn: int, tenant: str = "") -> str | None:
        reply = replies.find(tenant, session, turn)
        return (reply.text or reply.message["content"]) if reply else None

    assert [found("single-1", turn) for turn in range(3)] == ["a", "c", None]
    assert [found(session_key("", "s"), turn) for turn in range(2)] == ["b", None]
    assert found(branch_key(session_key("", "s")), 0) == "b"
    assert found(session_key("t", "s"), 0, "t") == "b"
    assert found(session_key("", "s"), 0, "t") == "a"


def test_both_forms_of_a_tool_call_are_read(tmp_path: Path) -> None:
    short = {"tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    function = {"name": "f", "arguments": '{"a": 1}'}
    openai = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    first, second = _read(tmp_path, short, openai).all
    assert first == second
    assert (first.tool_calls or ())[0].arguments == {"a": 1}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "replies.jsonl:2: not a JSON document"),
        ("[]", "should be an object"),
        ({"contents": "x"}, "contents: unknown field"),
        ({"text": "x", "content": "y"}, "either text, or content"),
        ({"session": "x"}, "either text, or content"),
        ({"content": ["x"]}, "content: Input should be a valid string"),
        ({"session": 1, "text": "x"}, "session: Input should be a valid string"),
        ({"tool_calls": [{"arguments": {}}]}, "tool_calls.0.name is missing"),
        ({"tool_calls": ["f"]}, "tool_calls.0: Input should be an object"),
        ({"tool_calls": 1.5}, "tool_calls: Input should be a valid array"),
        ({"tool_calls": [{"name": "f", "arguments": "{"}]}, "arguments: not JSON"),
        ({"tool_calls": [{"name": "f", "arguments": [1]}]}, "arguments: Input should be an object"),
        pytest.param("[" * 100_000, "replies.jsonl:2: not a JSON document", id="a nested line"),
        pytest.param(
            {"tool_calls": [{"name": "f", "arguments": "[" * 100_000}]}, "arguments: not JSON", id="nested arguments"
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        _read(tmp_path, {"content": "a"}, line)


def test_a_file_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    path.write_text('{"text": "für"}', encoding="utf-8")
    code = (
        "import pathlib, sys; from workers.engines.replies import Replies; "
        "print(ascii(Replies.read(pathlib.Path(sys.argv[1])).all[0].text))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", code, str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("'f\\xfcr'\n", "")


def test_a_file_without_replies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no reply"):
        _read(tmp_path, "")
    with pytest.raises(UserError, match="cannot be read"):
        Replies.read(tmp_path)
