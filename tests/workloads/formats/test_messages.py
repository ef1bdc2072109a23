"""Rounds from chat messages: whole messages are kept, and new ones count with what ChatML puts around them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.errors import UserError
from workloads.formats import LoadOptions
from workloads.formats.chat import END_TOKENS, HEADER_TOKENS, ChatCall, message_words, rounds_from_chat
from workloads.trace import Session

from .lab import NOTES, words

OPTIONS = LoadOptions(count_tokens=words, with_text=True, note=NOTES.append)
messages = st.lists(st.sampled_from(["a", "a b", "c d e", ""]), min_size=1, max_size=6).map(tuple)


@settings(max_examples=40)
@given(st.lists(st.builds(ChatCall, messages, st.sampled_from(["a", "x y"])), min_size=1, max_size=5))
def test_every_prompt_is_its_messages_and_the_header_of_the_answer(calls: list[ChatCall]) -> None:
    rounds = rounds_from_chat(calls, OPTIONS, "x")
    session = Session(session_id="s", arrival_s=0.0, rounds=rounds)
    for call, item, (history, increment) in zip(calls, rounds, session.prompts_tokens(), strict=True):
        around = HEADER_TOKENS + END_TOKENS
        prompt_tokens = sum(words(message) + around for message in call.messages) + HEADER_TOKENS
        assert history + increment == prompt_tokens
        assert item.output_tokens == words(call.output) + END_TOKENS


def test_only_what_is_new_is_text_and_a_changed_message_ends_what_is_kept() -> None:
    calls = [ChatCall(("s", "u"), "out"), ChatCall(("s", "u", "out", "more"), "end"), ChatCall(("s", "other"), "end")]
    first, second, third = rounds_from_chat(calls, OPTIONS, "x")
    assert [item.text for item in (first, second, third)] == ["s\nu", "more", "other"]
    assert [item.keep_tokens for item in (first, second, third)] == [None, None, 1 + HEADER_TOKENS + END_TOKENS]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None}, ""),
        ({"content": "hi"}, "hi"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "image"}, "b"]}, "a\n\nb"),
        ({"content": "x", "function_call": {"name": "f", "arguments": '{"a": 1}'}}, 'x\nf {"a": 1}'),
        ({"content": "", "tool_calls": [{"function": {"name": "g", "arguments": {"b": 2}}}, None]}, 'g {"b": 2}'),
    ],
)
def test_the_words_of_a_message(message: dict[str, object], expected: str) -> None:
    assert message_words(message) == expected


def test_no_call_at_all_is_named() -> None:
    with pytest.raises(UserError, match="place: holds no model call"):
        rounds_from_chat([], OPTIONS, "place")
