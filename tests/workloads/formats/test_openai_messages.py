"""OpenAI message logs: conversations, and requests with their responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from workloads.trace import SharedPrefix

from .lab import NOTES, jsonl, load, say, shape

CALL = {"type": "function", "id": "1", "function": {"name": "look", "arguments": '{"at": 1}'}}
CHAT = [
    say("system", "you are kind"),
    say("user", "one two three"),
    say("assistant", None, tool_calls=[CALL]),
    say("tool", "found it", tool_call_id="1"),
    say("assistant", "done now"),
]
FIRST = (3 + 4 + 3 + 4 + 3, 3 + 1, 0.0, None)
SECOND = (2 + 4 + 3, 2 + 1, 0.0, None)


def test_a_conversation_is_a_session_with_a_round_per_answer(tmp_path: Path) -> None:
    sessions = load("openai-messages", jsonl(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": CHAT[:3]}))
    assert [shape(session) for session in sessions] == [[FIRST, SECOND], [FIRST]]
    assert len({session.session_id for session in sessions}) == 2
    other = {"messages": [say("system", "you are stern"), *CHAT[1:]]}
    sessions += load("openai-messages", jsonl(tmp_path / "b.jsonl", other, {"messages": CHAT[1:3]}))
    names = [session.shared_prefix and session.shared_prefix.id for session in sessions]
    # Equal system messages are one prefix, and a chat without one shares nothing.
    assert names[0] == names[1] != names[2]
    assert names[3] is None
    assert sessions[0].shared_prefix == SharedPrefix(id=str(names[0]), tokens=3 + 4)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ({"session_id": "s"}, lambda prompt, answer: {"messages": prompt, "choices": [{"message": answer}]}),
        ({"conversation_id": "s"}, lambda prompt, answer: {"messages": prompt, "response": {"message": answer}}),
        (
            {"metadata": {"thread_id": "s"}},
            lambda prompt, answer: {"request": {"messages": prompt}, "response": {"choices": [{"message": answer}]}},
        ),
    ],
)
def test_requests_of_a_session_are_its_rounds(tmp_path: Path, name: dict[str, Any], form: Any) -> None:
    rows = [{**name, **form(CHAT[:2], CHAT[2])}, {**name, **form(CHAT[:4], CHAT[4])}]
    (session,) = load("openai-messages", jsonl(tmp_path / "a.jsonl", *rows))
    assert (session.session_id, shape(session)) == ("s", [FIRST, SECOND])


def test_tools_are_a_part_of_the_prompt(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "tools": [{"name": "look"}]}]
    (session,) = load("openai-messages", jsonl(tmp_path / "a.jsonl", *rows))
    assert shape(session) == [(FIRST[0] + 2 + 4, *FIRST[1:]), SECOND]
    assert session.shared_prefix is not None
    assert session.shared_prefix.tokens == 2 + 4 + 3 + 4


def test_rows_without_an_answer_are_noted_and_other_logs_refused(tmp_path: Path) -> None:
    assert load("openai-messages", jsonl(tmp_path / "a.jsonl", {"messages": CHAT[:2]})) == []
    assert "no answer of a model" in NOTES[0]
    with pytest.raises(UserError, match=r"a\.jsonl:1: there is no key messages"):
        load("openai-messages", jsonl(tmp_path / "a.jsonl", {"prompt": "x"}))
