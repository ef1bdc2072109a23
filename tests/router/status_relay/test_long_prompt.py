"""A prompt of `/v1/messages` that is too long gets its reason from `/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.status_relay.long_prompt import as_completion
from tests.router.status_relay.serving import client_of_relay

SAYS = "This model's maximum context length is 20 tokens. However, your messages resulted in 30 tokens."


class Frontend:
    """Fails at `/v1/messages` with a message, and answers completions as it is told."""

    def __init__(self, status: int, message: str, failure: str) -> None:
        self._status = status
        self._message = message
        self._failure = failure
        self.asked: list[Any] = []

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/messages", self._fail)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _fail(self, request: web.Request) -> web.Response:
        await request.read()
        error = {"type": "api_error", "message": self._failure}
        return web.json_response({"type": "error", "error": error}, status=500)

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked.append((request.headers.get("x-tenant-id"), await request.json()))
        return web.json_response({"message": self._message}, status=self._status)


@asynccontextmanager
async def asked(frontend: Frontend, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    async with (
        client_of_relay(web.AppRunner(frontend.application())) as client,
        client.post("/v1/messages", json=body, headers={"x-tenant-id": "acme"}) as answer,
    ):
        yield answer


@pytest.mark.parametrize("is_stream", [False, True])
async def test_it_gets_400_and_the_reason(is_stream: bool) -> None:
    frontend = Frontend(400, SAYS, "Internal server error")
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}], "stream": is_stream}
    async with asked(frontend, body) as answer:
        assert answer.status == 400
        error = {"type": "invalid_request_error", "message": f"prompt is too long: {SAYS}"}
        assert await answer.json() == {"type": "error", "error": error}
    assert frontend.asked == [("acme", as_completion(body))]


@pytest.mark.parametrize(
    ("status", "message", "failure", "questions"),
    [
        (400, "ttft_target: no number", "Internal server error", 1),
        (500, "Failed to fold completions stream", "Internal server error", 1),
        (200, SAYS, "Internal server error", 1),
        (400, SAYS, "the coordinator failed", 0),
    ],
)
async def test_other_failures_stay_as_they_are(status: int, message: str, failure: str, questions: int) -> None:
    frontend = Frontend(status, message, failure)
    async with asked(frontend, {"model": "m", "messages": []}) as answer:
        assert (answer.status, (await answer.json())["error"]["message"]) == (500, failure)
    assert len(frontend.asked) == questions


@pytest.mark.parametrize("body", [[], "x", None])
async def test_a_body_that_is_no_object_is_not_asked_about(body: Any) -> None:
    frontend = Frontend(400, SAYS, "Internal server error")
    async with asked(frontend, body) as answer:
        assert answer.status == 500
    assert frontend.asked == []


def test_the_question_has_all_texts_of_the_prompt() -> None:
    message = {
        "model": "m",
        "max_tokens": 5,
        "stream": True,
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "Größe?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "größe"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "12"}]},
                    {"type": "tool_result", "tool_use_id": "2", "content": "13"},
                    {"type": "image", "source": {"data": "AAAA"}},
                ],
            },
        ],
    }
    prompt = as_completion(message)["prompt"].splitlines()
    tools = '[{"name": "look", "input_schema": {"type": "object"}}]'
    assert prompt == ["Be brief.", "Größe?", "I look.", '{"at": "größe"}', "12", "13", tools]


def nested(levels: int) -> Any:
    part: Any = "x"
    for _ in range(levels):
        part = [part]
    return part


@pytest.mark.parametrize(
    "part", [nested(5000), None, 5, [[]], [{"content": None}], {"text": 5}, [None, {"type": "text"}]]
)
def test_nonsense_has_no_text(part: Any) -> None:
    assert as_completion({"messages": part, "system": part})["prompt"] == ""
