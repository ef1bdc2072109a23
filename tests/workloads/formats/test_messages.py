"""Rounds from chat messages: whole messages are kept, and new ones count with what ChatML puts around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.formats import LoadOptions
from workloads.formats.chat import answer_of, message_words, usage_of
from workloads.formats.rounds import END_TOKENS, HEADER_TOKENS, Request, sessions_of
from workloads.trace import Session

from .lab import NOTES, words

OPTIONS = LoadOptions(count_tokens=words, with_text=True, note=NOTES.append)
messages = st.lists(st.sampled_from(["a", "a b", "c d e", ""]), min_size=1, max_size=6).map(tuple)


def _call(prompt: tuple[str, ...], answer: str, **more: Any) -> Request:
    return Request("x", session="s", part="x", messages=prompt, answer=answer, **more)


def _session(calls: list[Request]) -> Session:
    (session,) = sessions_of(calls, Path("x"), OPTIONS)
    return session


@settings(max_examples=40)
@given(st.lists(st.builds(_call, messages, st.sampled_from(["a", "x y"])), min_size=1, max_size=5))
def test_every_prompt_is_its_messages_and_the_header_of_the_answer(calls: list[Request]) -> None:
    session = _session(calls)
    for call, item, (history, increment) in zip(calls, session.rounds, session.prompts_tokens(), strict=True):
        around = HEADER_TOKENS + END_TOKENS
        prompt_tokens = sum(words(message) + around for message in call.messages) + HEADER_TOKENS
        assert history + increment == prompt_tokens
        assert item.output_tokens == words(str(call.answer)) + END_TOKENS


def test_only_what_is_new_is_text_and_a_changed_message_ends_what_is_kept() -> None:
    calls = [_call(("s", "u"), "out"), _call(("s", "u", "out", "more"), "end"), _call(("s", "other"), "end")]
    first, second, third = _session(calls).rounds
    assert [item.text for item in (first, second, third)] == ["s\nu", "more", "other"]
    assert [item.keep_tokens for item in (first, second, third)] == [None, None, 1 + HEADER_TOKENS + END_TOKENS]


def test_recorded_usage_goes_before_counting_and_the_words_tell_what_is_kept() -> None:
    calls = [
        _call(("s", "u"), "out", prompt_tokens=1000, output_tokens=100),
        _call(("s", "u", "another form of the answer", "x"), "end", prompt_tokens=1200, output_tokens=10),
        _call(("s", "else"), "end", prompt_tokens=2000, output_tokens=10),
    ]
    shapes = [(item.incr_tokens, item.output_tokens, item.keep_tokens) for item in _session(calls).rounds]
    assert shapes == [(1000, 100, None), (100, 10, None), (1000, 10, 1000)]


def test_an_answer_that_comes_back_without_its_reasoning_is_prefilled_again() -> None:
    calls = [_call(("u",), "much thought\nout", bare_answer="out"), _call(("u", "out", "more"), "end")]
    assert _session(calls).rounds[1].keep_tokens == 1 + HEADER_TOKENS + END_TOKENS


def test_contexts_of_a_session_that_alternate_are_apart_and_a_changing_preamble_is_not() -> None:
    prompts = [
        ("main", "u"),
        ("sub", "v"),
        ("main", "u", "a", "x"),
        ("sub", "v", "a", "y"),
        ("main", "u", "a", "x", "a", "z"),
    ]
    main, sub = sessions_of(
        [Request("x", session="s", messages=each, answer="a") for each in prompts], Path("x"), OPTIONS
    )
    assert [(each.session_id, len(each.rounds)) for each in (main, sub)] == [("s", 3), ("s/branch2", 2)]
    assert [item.keep_tokens for item in (*main.rounds, *sub.rounds)] == [None] * 5
    dated = [Request("x", session="s", messages=(f"today is {day}", "u"), answer="a") for day in range(3)]
    (session,) = sessions_of(dated, Path("x"), OPTIONS)
    assert [item.keep_tokens for item in session.rounds] == [None, 0, 0]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None}, ""),
        ({"content": "hi"}, "hi"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "image"}, "b"]}, "a\nb"),
        ({"content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]}, 'f {"a": 1}'),
        ({"content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]}]}, "r"),
        (
            {"content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "a"}]},
            "hm\na",
        ),
        ({"content": "a", "reasoning_content": "hm"}, "hm\na"),
        ({"content": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "f {}"),
        ({"type": "function_call_output", "output": "r"}, "r"),
        ({"role": "user", "parts": [{"type": "text", "content": "p"}, {"text": "q"}]}, "p\nq"),
        ({"parts": [{"functionCall": {"name": "f", "args": {"a": 1}}}]}, '{"name": "f", "args": {"a": 1}}'),
        ({"from": "human", "value": "v"}, "v"),
        ({"content": "x", "function_call": {"name": "f", "arguments": '{"a": 1}'}}, 'x\nf {"a": 1}'),
        ({"content": "", "tool_calls": [{"function": {"name": "g", "arguments": {"b": 2}}}, None]}, 'g {"b": 2}'),
    ],
)
def test_the_words_of_a_message(message: dict[str, object], expected: str) -> None:
    assert message_words(message) == expected


def test_the_words_without_reasoning_are_what_later_prompts_repeat() -> None:
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]
    for message in ({"content": blocks}, {"content": "a", "reasoning": "hm"}, {"content": "<think>hm\n</think>\n\na"}):
        assert message_words(message, reasoning=False) == "a"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"choices": [{"message": {"content": "a"}}]}, "a"),
        ({"choices": [{"text": "a"}]}, "a"),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}]}, "a"),
        ({"output": [{"type": "reasoning", "summary": []}, {"role": "assistant", "content": [{"text": "a"}]}]}, "\na"),
        ({"candidates": [{"content": {"parts": [{"text": "a"}]}}]}, "a"),
        ('{"role": "assistant", "content": "a"}', "a"),
        ("a", "a"),
        ([{"role": "assistant", "parts": [{"type": "text", "content": "a"}]}], "a"),
    ],
)
def test_the_answer_in_the_responses_of_all_providers(response: Any, expected: str) -> None:
    assert message_words(answer_of(response) or {}).strip() == expected.strip()


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}, (9, 2, 8)),
        ({"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}, (9, 2, 8)),
        # Anthropic counts what the cache had or stored apart.
        (
            {"input_tokens": 1, "output_tokens": 2, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 4},
            (13, 2, 8),
        ),
        ({"input_tokens": 9, "cached_input_tokens": 8, "output_tokens": 2, "reasoning_output_tokens": 1}, (9, 2, 8)),
        ({"promptTokenCount": 9, "candidatesTokenCount": 2, "thoughtsTokenCount": 5}, (9, 7, None)),
        ({"input": 1, "input_cached_tokens": 8, "output": 2, "total": 11}, (9, 2, 8)),
        ({"input": 9, "input_cached_tokens": 8, "output": 2, "total": 11}, (9, 2, 8)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, (None, None, None)),
        (None, (None, None, None)),
    ],
)
def test_the_usage_of_all_providers(usage: Any, expected: tuple[int | None, ...]) -> None:
    found = usage_of(usage, "x")
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == expected
