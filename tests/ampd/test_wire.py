"""The messages between coordinator and workers."""

from typing import Any

import pytest

from ampd.types import PrefillTask, Slo
from ampd.wire import (
    decode_task,
    encode_task,
    error_text,
    parse_error,
    retry_after_s,
    with_retry_after,
)

MESSAGE: dict[str, Any] = {
    "task_id": "t",
    "session_id": "s",
    "hist_tokens": 30,
    "incr_tokens": 12,
    "arrival_s": -0.5,
    "slo": {"ttft_s": 1.0, "itl_s": 0.1},
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


@pytest.mark.parametrize("name", ["task_id", "incr_tokens", "arrival_s", "slo"])
def test_a_task_without_a_required_field_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
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
        ("Unavailable: instance_id=57005 not found {", None),
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
