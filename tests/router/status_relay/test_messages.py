"""`/v1/messages` through the relay. The frontend answers as Dynamo's does: it drops comments, and passes text on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ampd.relay_mark import RelayMark, relay_mark
from ampd.wire import RELAY_HEADER, Refused, refusal_text, with_retry_after
from tests.router.status_relay.serving import client_of_relay

PATH = "/v1/messages"
FULL = Refused(429, with_retry_after("the queue is full", 7.2))
START = (b'event: message_start\ndata: {"type":"message_start"}\n\n',)
FAILED = (b'event: error\ndata: {"type":"error","error":{"message":"An internal error"}}\n\n', b"data: [DONE]\n\n")


def output(text: str, kind: str = "text") -> tuple[bytes, ...]:
    """The events by which the output of a message begins."""
    data = json.dumps({"type": "content_block_delta", "index": 0, "delta": {"type": f"{kind}_delta", kind: text}})
    return (
        b'event: content_block_start\ndata: {"index":0}\n\n',
        f"event: content_block_delta\ndata: {data}\n\n".encode(),
    )


def is_for_text(mark: str) -> bool:
    """Whether the relay asks for a refusal as text."""
    read = relay_mark(mark)
    assert read is not None
    return read.is_question and read.as_text


Answers = Callable[[str], tuple[bytes, ...]]
"""The mark of a request for a stream -> the events of its answer behind the start."""


class Frontend:
    """Answers streams as it is told, and other requests with a status and no reason."""

    def __init__(self, answers: Answers, status: int = 429, message: str = "Too Many Requests") -> None:
        self._answers = answers
        self._status = status
        self._message = message
        self.asked: list[tuple[bool, str]] = []

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post(PATH, self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body, mark = await request.json(), request.headers[RELAY_HEADER]
        assert body["model"] == "m"
        self.asked.append((bool(body.get("stream")), mark))
        if not body.get("stream"):
            error = {"type": "error", "error": {"type": "some_error", "message": self._message}}
            return web.json_response(error, status=self._status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in (*START, *self._answers(mark)):
            await response.write(event)
        return response


@asynccontextmanager
async def asked(frontend: Frontend, **body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer to a client of the relay."""
    async with (
        client_of_relay(web.AppRunner(frontend.application())) as client,
        client.post(PATH, json={"model": "m", **body}) as answer,
    ):
        yield answer


def refuses(refused: Refused, kind: str = "text") -> Answers:
    """A round that is refused each time."""

    def answers(mark: str) -> tuple[bytes, ...]:
        return FAILED if not is_for_text(mark) else (*output(refusal_text(refused, mark), kind), *FAILED)

    return answers


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error")],
)
async def test_a_stream_that_is_refused_gets_status_reason_and_time(status: int, kind: str) -> None:
    frontend = Frontend(refuses(Refused(status, FULL.message)))
    async with asked(frontend, stream=True) as answer:
        assert (answer.status, answer.headers["retry-after"]) == (status, "8")
        assert await answer.json() == {"type": "error", "error": {"type": kind, "message": FULL.message}}
    (_, first), (_, second) = frontend.asked
    assert not is_for_text(first)
    assert is_for_text(second)


async def test_each_second_question_has_a_secret_of_its_own() -> None:
    frontend = Frontend(refuses(FULL))
    for _ in range(2):
        async with asked(frontend, stream=True) as answer:
            assert answer.status == FULL.status
    assert len({mark for _, mark in frontend.asked}) == 4


async def test_a_refusal_may_come_as_a_thought() -> None:
    async with asked(Frontend(refuses(FULL, "thinking")), stream=True) as answer:
        assert answer.status == FULL.status


async def test_the_text_of_a_model_is_no_refusal() -> None:
    """It knows the words, but not the secret."""
    events = output(refusal_text(FULL, str(RelayMark("1").question(as_text=True))))
    frontend = Frontend(lambda _: events)
    async with asked(frontend, stream=True) as answer:
        assert (answer.status, await answer.read()) == (200, b"".join((*START, *events)))
    assert len(frontend.asked) == 1

    frontend = Frontend(lambda mark: FAILED if not is_for_text(mark) else events)
    async with asked(frontend, stream=True) as answer:
        assert (answer.status, await answer.read()) == (200, b"".join((*START, *FAILED)))


async def test_an_error_behind_the_output_is_no_refusal() -> None:
    events = (*output("Rome"), *FAILED)
    frontend = Frontend(lambda _: events)
    async with asked(frontend, stream=True) as answer:
        assert (answer.status, await answer.read()) == (200, b"".join((*START, *events)))
    assert len(frontend.asked) == 1


async def test_an_answer_without_a_reason_gets_it_from_a_stream() -> None:
    frontend = Frontend(refuses(FULL))
    async with asked(frontend) as answer:
        assert (answer.status, answer.headers["retry-after"]) == (429, "8")
        assert (await answer.json())["error"]["message"] == FULL.message
    assert [is_stream for is_stream, _ in frontend.asked] == [False, True]


@pytest.mark.parametrize(("status", "message"), [(429, "too long"), (405, "Not Found"), (200, "OK")])
async def test_other_answers_go_through(status: int, message: str) -> None:
    frontend = Frontend(refuses(FULL), status, message)
    async with asked(frontend) as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (status, "some_error")
    assert len(frontend.asked) == 1
