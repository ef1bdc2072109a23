"""OpenAI message logs: conversations, and requests with their responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from workloads.formats import detect
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
    with pytest.raises(UserError, match=r"a\.jsonl:1: no row has what openai-messages has \(messages or "):
        load("openai-messages", jsonl(tmp_path / "a.jsonl", {"question": "x"}))


def _logged(prompt: list[Any], answer: Any, **more: Any) -> dict[str, Any]:
    return {"messages": prompt, "choices": [{"message": answer}], **more}


def test_requests_without_a_name_are_chained_by_their_messages(tmp_path: Path) -> None:
    other = [CHAT[0], say("user", "four five")]
    rows = [
        _logged(CHAT[:2], CHAT[2]),
        _logged(other, say("assistant", "six")),
        _logged(CHAT[:4], CHAT[4], timestamp="yesterday"),
        _logged([*CHAT[:4], say("user", "not what was answered")], say("assistant", "x")),
    ]
    chained, alone, branch = load("openai-messages", jsonl(tmp_path / "a.jsonl", *rows))
    assert shape(chained) == [FIRST, SECOND]
    assert [len(session.rounds) for session in (alone, branch)] == [1, 1]
    sessions_note, times_note = NOTES
    assert "4 requests name no session; 1 of them" in sessions_note
    assert "1 later requests have no time" in times_note


@pytest.mark.parametrize(
    "times",
    [
        [{"created": 1_760_000_000}, {"created": 1_760_000_003}, {"created": 1_760_000_005}],
        [{"timestamp": 1_760_000_000_000}, {"timestamp": 1_760_000_003_000}, {"timestamp": 1_760_000_005_000}],
        [{"created_at": f"2026-01-01T00:00:0{second}Z"} for second in (0, 3, 5)],
    ],
)
def test_times_of_requests_are_gaps_and_arrivals(tmp_path: Path, times: list[dict[str, Any]]) -> None:
    other = _logged([say("user", "four five")], say("assistant", "six"))
    rows = [_logged(CHAT[:2], CHAT[2]), other, _logged(CHAT[:4], CHAT[4])]
    rows = [row | time for row, time in zip(rows, times, strict=True)]
    first, second = load("openai-messages", jsonl(tmp_path / "a.jsonl", *rows))
    assert [round_.tool_s for round_ in first.rounds] == [0.0, 5.0]
    assert (first.arrival_s, second.arrival_s) == (0.0, 3.0)
    assert len(NOTES) == 1


def test_tool_blocks_are_counted(tmp_path: Path) -> None:
    """The form of `/v1/messages`: calls and results are blocks of the content."""
    call = {"type": "tool_use", "id": "t0", "name": "bash", "input": {"command": "ls -la " * 30}}
    result = {"type": "tool_result", "tool_use_id": "t0", "content": [{"type": "text", "text": "file " * 800}]}
    thought = {"type": "thinking", "thinking": "hm " * 40, "signature": "c2ln"}
    chat = [say("user", "hi")]
    for _ in range(2):
        chat += [say("assistant", None) | {"content": [thought, call]}, say("user", None) | {"content": [result]}]
    path = jsonl(tmp_path / "blocks.jsonl", {"messages": [*chat, say("assistant", "done")]})
    first, second, third = shape(load("openai-messages", path)[0])
    assert (second[0], third[0]) == (800 + 4 + 3, 800 + 4 + 3)
    assert first[1] == second[1] == 40 + 1 + 1 + 60 + 1 + 1


def test_an_array_is_read_as_lines_are(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for indent in (None, 1):
        path.write_text(json.dumps([{"messages": CHAT}, {"messages": CHAT[:3]}, CHAT], indent=indent))
        sessions = load("openai-messages", path)
        assert [shape(session) for session in sessions] == [[FIRST, SECOND], [FIRST], [FIRST, SECOND]]
        assert len({session.session_id for session in sessions}) == 3
    path.write_text(json.dumps(CHAT))
    assert [shape(session) for session in load("openai-messages", path)] == [[FIRST, SECOND]]


def test_recorded_usage_goes_before_counting(tmp_path: Path) -> None:
    usages = ({"prompt_tokens": 1000, "completion_tokens": 50}, {"prompt_tokens": 1200, "completion_tokens": 30})
    rows = [_logged(CHAT[:2], CHAT[2], usage=usages[0]), _logged(CHAT[:4], CHAT[4], usage=usages[1])]
    (session,) = load("openai-messages", jsonl(tmp_path / "a.jsonl", *rows))
    assert shape(session) == [(1000, 50, 0.0, None), (150, 30, 0.0, None)]
    timed = [row | {"created": 1_764_300_000 + 5 * at} for at, row in enumerate(rows)]
    (session,) = load("openai-messages", jsonl(tmp_path / "a.jsonl", *reversed(timed)))
    assert shape(session) == [(1000, 50, 0.0, None), (150, 30, 5.0, None)]


@pytest.mark.parametrize(
    "metadata",
    [{"user_id": "user_ab_account__session_s-1"}, {"user_id": '{"device_id": "d", "session_id": "s-1"}'}],
)
def test_claude_code_names_its_session_in_the_name_of_its_user(tmp_path: Path, metadata: dict[str, str]) -> None:
    rows = [{"request": {"messages": CHAT[:2], "metadata": metadata}, "response": {"content": "hi"}}]
    assert [session.session_id for session in load("openai-messages", jsonl(tmp_path / "a.jsonl", *rows))] == ["s-1"]


def test_rows_in_the_envelope_of_an_api_and_responses_without_prompts(tmp_path: Path) -> None:
    usage = {"usage": {"prompt_tokens": 22, "completion_tokens": 2}}
    row = {"custom_id": "r1", "response": {"status_code": 200, "body": {"choices": [], **usage}}}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": [row, row], "has_more": False}))
    assert detect(path) == ("openai-messages", "its rows have response/body/usage")
    assert [shape(session)[0][:2] for session in load("openai-messages", path)] == [(22, 2), (22, 2)]


def test_chains_go_on_where_an_answer_comes_back_without_its_reasoning(tmp_path: Path) -> None:
    thoughtful = {**CHAT[2], "reasoning_content": "hm hm"}
    rows = [_logged(CHAT[:2], thoughtful, created=0), _logged(CHAT[:4], CHAT[4], created=5)]
    (session,) = load("openai-messages", jsonl(tmp_path / "a.jsonl", *rows))
    first, second = shape(session)
    assert first == (FIRST[0], FIRST[1] + 2, 0.0, None)
    # The answer without its reasoning is prefilled again, behind the first prompt without the header of the answer.
    assert second == (3 + 4 + 2 + 4 + 3, SECOND[1], 5.0, FIRST[0] - 3)


def test_a_conversation_that_is_logged_again_as_it_grows_counts_once(tmp_path: Path) -> None:
    rows = [{"session_id": "s", "created": at, "messages": CHAT[:end]} for at, end in ((100, 3), (107, 5), (108, 5))]
    (session,) = load("openai-messages", jsonl(tmp_path / "a.jsonl", *rows))
    assert shape(session) == [FIRST, (*SECOND[:2], 7.0, None)]
