"""The messages between coordinator and workers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.types import PrefillTask, Slo
from ampd.wire import (
    Refused,
    decode_task,
    encode_task,
    error_text,
    parse_error,
    refusal_comment,
    refusal_in,
    refusal_in_text,
    refusal_text,
    retry_after_s,
    with_retry_after,
)

MESSAGE: dict[str, Any] = {
    "task_id": "t",
    "session_id": "s",
    "hist_tokens": 30,
    "incr_tokens": 12,
    "waited_s": 0.5,
    "ttft_s": 1.0,
    "itl_s": 0.1,
    "postponements": 3,
    "session_missed": True,
    "has_output": True,
}
TASK = PrefillTask("t", "s", 30, 12, 9.5, Slo(1.0, 0.1), postponements=3, session_missed=True, has_output=True)


def test_a_task_is_sent_under_these_keys() -> None:
    assert encode_task(TASK, 10.0) == MESSAGE


def test_a_task_counts_back_from_its_arrival_here() -> None:
    assert decode_task(MESSAGE, 10.0) == TASK


def test_what_another_version_sends_is_read() -> None:
    optional = ("postponements", "session_missed", "has_output")
    required = {name: value for name, value in MESSAGE.items() if name not in optional}
    assert decode_task({**required, "later": 1}, 10.0) == PrefillTask("t", "s", 30, 12, 9.5, Slo(1.0, 0.1))


@pytest.mark.parametrize("name", ["task_id", "incr_tokens", "waited_s", "itl_s"])
def test_a_task_without_a_required_field_is_refused(name: str) -> None:
    with pytest.raises((KeyError, TypeError)):
        decode_task({key: value for key, value in MESSAGE.items() if key != name}, 10.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (error_text(400, "too long"), (400, "too long")),
        ("Backend: " + error_text(503, "gone\naway"), (503, "gone\naway")),
        (
            'BackendInvalidArgument: {"message":"ampd-error 400: say \\"please\\" {x}","code":400}',
            (400, 'say "please" {x}'),
        ),
        ('BackendUnknown: {"message":"something else","code":500}', None),
        ("CannotConnect: instance_id=57005 not found {", None),
        ("", None),
    ],
)
def test_a_refusal_keeps_its_status_through_dynamo(text: str, expected: tuple[int, str] | None) -> None:
    assert parse_error(text) == expected


@pytest.mark.parametrize(("wait_s", "named_s"), [(0.0, 1), (1.0, 1), (2.2, 3), (60.0, 60)])
def test_the_seconds_of_retry_after_are_read_back_from_the_message(wait_s: float, named_s: int) -> None:
    assert retry_after_s(with_retry_after("the queue is full", wait_s)) == named_s


def test_a_message_without_seconds_names_none() -> None:
    assert retry_after_s("the queue is full") is None


def test_an_envelope_that_is_nested_too_deeply_is_plain_text() -> None:
    assert parse_error('Backend<Unknown>: {"message": ' + "[" * 100_000 + "}") is None


@given(st.integers(400, 599), st.text())
def test_a_refusal_comes_back_from_its_comment(status: int, message: str) -> None:
    comment = refusal_comment(Refused(status, message))
    assert "\n" not in comment
    assert "\r" not in comment
    assert refusal_in(f" {comment}") == Refused(status, message)


@given(st.integers(400, 599), st.text(), st.text(min_size=8), st.text())
def test_a_refusal_comes_back_from_its_text_with_its_mark_only(
    status: int, message: str, mark: str, other: str
) -> None:
    refused = Refused(status, message)
    text = refusal_text(refused, mark)
    assert refusal_in_text(text, mark) == refused
    assert refusal_in_text(other + text, mark) is None or not other
    assert refusal_in_text(refusal_comment(refused), mark) is None, "the text of a model"


JSON = st.fixed_dictionaries({}, optional={"status": st.one_of(st.integers(), st.text()), "message": st.text()})


@given(st.one_of(st.text(), st.builds(lambda value: f"ampd-refusal {json.dumps(value)}", JSON)))
def test_any_other_comment_is_no_refusal(comment: str) -> None:
    refused = refusal_in(comment)
    assert refused is None or 400 <= refused.status < 600


def test_a_comment_that_is_nested_too_deep_is_no_refusal() -> None:
    assert refusal_in("ampd-refusal " + "[" * 100_000) is None
