"""Which bodies the relay keeps for a second question, and for how long."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from ampd.wire import Refused, refusal_comment
from router.status_relay import kept_bodies, relay
from tests.router.status_relay.serving import client_of_relay
from tests.waiting import until

LONG = 100_000
FULL = Refused(429, "the queue is full")
COMPLETION = {"prompt": "x" * LONG}


class Frontend:
    """Refuses each completion, with the reason in a stream only, and streams each response."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.asked = asyncio.Semaphore(0)
        self.left = asyncio.Event()
        self.questions = 0
        self.at_once = 0
        self.most_at_once = 0
        self.answers = asyncio.Event()
        """Questions."""
        self.answers.set()

    def runner(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/responses", self._respond)
        return web.AppRunner(app, handler_cancellation=True)

    async def _complete(self, request: web.Request) -> web.Response:
        try:
            if (await request.json()).get("stream"):
                await self._count_question()
                event = f"event: refusal\n: {refusal_comment(FULL)}\n\n".encode()
                return web.Response(body=event, content_type="text/event-stream")
            self.asked.release()
            await self.go_on.wait()
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        return web.json_response({"message": "Failed to fold completions stream"}, status=500)

    async def _count_question(self) -> None:
        self.questions += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.2)  # in which others would come
        await self.answers.wait()
        self.at_once -= 1

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"event: response.output_text.delta\ndata: {}\n\n")
        await self.go_on.wait()
        return response


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Frontend, aiohttp.ClientSession]]:
    frontend = Frontend()
    async with client_of_relay(frontend.runner()) as client, asyncio.timeout(60):
        yield frontend, client


async def status(client: aiohttp.ClientSession) -> int:
    async with client.post("/v1/completions", json=COMPLETION) as answer:
        return answer.status


@pytest.mark.parametrize(("more", "expected", "questions"), [(0, 429, 1), (1, 500, 0)])
async def test_a_body_above_the_bound_is_not_asked_again(more: int, expected: int, questions: int) -> None:
    body = b'{"prompt":"%s"}' % (b"x" * (kept_bodies.MOST_BYTES + more - len('{"prompt":""}')))
    headers = {"content-type": "application/json"}
    async with relayed() as (frontend, client):
        async with client.post("/v1/completions", data=io.BytesIO(body), headers=headers) as answer:
            assert answer.status == expected
        assert frontend.questions == questions


async def test_there_are_few_second_questions_at_a_time() -> None:
    """Each takes the loop and memory while its body is read."""
    async with relayed() as (frontend, client):
        frontend.go_on.clear()
        asking = [asyncio.create_task(status(client)) for _ in range(2 * relay.QUESTIONS_AT_ONCE)]
        for _ in asking:
            await frontend.asked.acquire()
        frontend.go_on.set()
        assert await asyncio.gather(*asking) == [429] * len(asking)
        assert frontend.questions == len(asking)
        assert frontend.most_at_once == relay.QUESTIONS_AT_ONCE


async def test_a_question_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PATIENCE_S", 0.1)
    monkeypatch.setattr(relay, "QUESTIONS_AT_ONCE", 1)
    async with relayed() as (_, client):
        assert await status(client) == 500
        monkeypatch.setattr(relay, "PATIENCE_S", 60.0)
        assert await status(client) == 429, "the turn is free again"


async def test_a_question_that_waits_too_long_for_its_turn_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "QUESTIONS_AT_ONCE", 1)
    monkeypatch.setattr(relay, "PATIENCE_S", 60.0)
    async with relayed() as (frontend, client):
        frontend.answers.clear()
        first = asyncio.create_task(status(client))
        await until(lambda: frontend.questions == 1)
        monkeypatch.setattr(relay, "PATIENCE_S", 0.1)
        assert await status(client) == 500
        assert frontend.questions == 1
        frontend.answers.set()
        assert await first == 429


async def test_other_work_goes_on_between_two_bodies_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one takes the loop for so long that streams would stand still during several."""
    happened: list[str] = []
    read = kept_bodies.KeptBody.in_form

    def in_form(body: kept_bodies.KeptBody, form: kept_bodies.Form) -> bytes | None:
        happened.append("body")
        asyncio.get_running_loop().call_soon(happened.append, "other work")
        return read(body, form)

    monkeypatch.setattr(kept_bodies.KeptBody, "in_form", in_form)
    async with relayed() as (frontend, client):
        frontend.go_on.clear()
        asking = [asyncio.create_task(status(client)) for _ in range(4)]
        for _ in asking:
            await frontend.asked.acquire()
        frontend.go_on.set()
        await asyncio.gather(*asking)
    assert happened == ["body", "other work"] * len(asking)


async def test_bodies_have_a_bound_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_bodies, "MOST_BYTES_IN_ALL", LONG * 3 // 2)
    async with relayed() as (frontend, client):
        frontend.go_on.clear()
        first, second = (asyncio.create_task(status(client)) for _ in range(2))
        for _ in range(2):
            await frontend.asked.acquire()
        frontend.go_on.set()
        assert sorted([await first, await second]) == [429, 500]
        assert await status(client) == 429, "there is room again"


async def test_a_body_is_kept_no_longer_than_a_second_question_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream lasts for minutes, and a body may have many megabytes."""
    monkeypatch.setattr(kept_bodies, "MOST_BYTES_IN_ALL", LONG * 3 // 2)
    async with relayed() as (frontend, client):
        frontend.go_on.clear()
        async with client.post("/v1/responses", json={"stream": True, "input": "x" * LONG}) as answer:
            await answer.content.readany()
            asking = asyncio.create_task(status(client))
            await frontend.asked.acquire()
            frontend.go_on.set()
            assert await asking == 429


async def test_the_body_of_a_client_that_leaves_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_bodies, "MOST_BYTES_IN_ALL", LONG * 3 // 2)
    async with relayed() as (frontend, client):
        frontend.go_on.clear()
        leaving = asyncio.create_task(status(client))
        await frontend.asked.acquire()
        leaving.cancel()
        await frontend.left.wait()
        frontend.go_on.set()
        assert await status(client) == 429
