"""Faults that clients cause: how a failure that no status shows is found."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import httpx
import pytest

import router.coordinator
from benchmarks.faults.request_faults import (
    COORDINATOR_FAILED,
    ENGINE_STARTS_AGAIN,
    complaints_of,
    deadly_complaints,
    deaths_of,
    unexpected_failures,
)

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FOLDED = httpx.Response(500, text="Failed to fold completions stream")
UNPARSED = httpx.Response(500, json={"message": "Failed to parse chat completion response", "code": 500})


def test_an_exception_in_a_coordinator_is_a_complaint() -> None:
    lines: list[dict[str, Any]] = [
        {"message": "round refused"},
        {"message": COORDINATOR_FAILED, "level": "ERROR"},
        {"other": 1},
    ]
    assert unexpected_failures("coordinator-1", lines) == [f"coordinator-1: {COORDINATOR_FAILED}"]
    assert unexpected_failures("coordinator-1", lines[:1]) == []


def test_coordinators_log_this_line() -> None:
    tree = ast.parse(Path(router.coordinator.__file__).read_text("utf-8"))
    logged = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert COORDINATOR_FAILED in logged


@pytest.mark.parametrize(
    ("name", "path", "answer", "is_refusal"),
    [
        ("a", CHATS, httpx.Response(400, text="no"), True),
        ("a", CHATS, httpx.Response(400), False),
        ("a", CHATS, httpx.Response(500, text="no"), False),
        ("a", CHATS, FOLDED, False),
        ("a", COMPLETIONS, FOLDED, False),
        ("a", CHATS, UNPARSED, False),
        ("a", CHATS, httpx.ReadError("closed"), False),
        ("a", CHATS, httpx.ReadTimeout("late"), False),
        ("a prompt of 45 MB", COMPLETIONS, httpx.ReadError("closed"), True),
        ("a prompt of 45 MB", COMPLETIONS, httpx.ReadTimeout("late"), False),
    ],
)
async def test_a_poisonous_request_needs_a_clear_refusal(
    name: str, path: str, answer: httpx.Response | Exception, is_refusal: bool
) -> None:
    def serve(_request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with httpx.AsyncClient(base_url="http://graph", transport=httpx.MockTransport(serve)) as http:
        complaints = await complaints_of(http, name, path, {})
    assert [text.startswith(f"{name}: ") for text in complaints] == [True] * (not is_refusal)


def test_deaths_are_workers_that_ended_and_engines_that_start_again() -> None:
    class Worker:
        def __init__(self, is_running: bool, *messages: str) -> None:
            self.is_running, self._messages = is_running, messages

        def read_log(self) -> list[dict[str, Any]]:
            return [{"message": message} for message in self._messages] + [{"other": 1}]

    again = f"SGLang's process Process-2 ended by itself; {ENGINE_STARTS_AGAIN}, its KV in host memory stays"
    workers: Any = [Worker(True, again, "the engine serves again", again), Worker(False), Worker(True)]
    assert deaths_of(workers) == 3
    assert deaths_of(workers[2:]) == 0


def test_a_deadly_request_ends_two_workers_at_most_however_often_it_is_sent() -> None:
    refused, served = httpx.Response(500, text="no"), httpx.Response(200, text="yes")
    others = [httpx.Response(503, text="no live decode worker"), httpx.Response(429, text="a round waits")]
    assert deadly_complaints(1, refused, 2) == deadly_complaints(5, refused, 2) == []
    assert [deadly_complaints(2, reply, 2) for reply in others] == [[], []]
    assert deadly_complaints(2, refused, 3) == ["the deadly request has ended 3 workers after sending 2"]
    assert deadly_complaints(2, served, 2) == ["the deadly request got 200 at sending 2: yes"]
