"""404s of a frontend that has no model yet, or has lost it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from tests.router.status_relay.serving import client_of_relay

CHATS, MESSAGES = "/v1/chat/completions", "/v1/messages"


class Frontend:
    """As Dynamo's: without a model it has no path of the API, and an unknown model is a 404 with a body."""

    def __init__(self) -> None:
        self.models: list[str] = []
        self.paths = [CHATS]

    def runner(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/{path:.*}", self._serve)
        return web.AppRunner(app)

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _serve(self, request: web.Request) -> web.Response:
        if request.path not in self.paths:
            return web.Response(status=404)
        if not request.can_read_body:
            return web.Response(status=400)
        model = (await request.json())["model"]
        known = model in self.models
        return web.json_response(
            {"message": f"Model not found: {model}"} if not known else {}, status=200 if known else 404
        )


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Frontend, aiohttp.ClientSession]]:
    frontend = Frontend()
    async with client_of_relay(frontend.runner()) as client:
        yield frontend, client


async def answer(client: aiohttp.ClientSession, path: str = CHATS, model: str = "m") -> tuple[int, str | None, bytes]:
    async with client.post(path, json={"model": model}) as got:
        return got.status, got.headers.get("retry-after"), await got.read()


@pytest.mark.parametrize("path", [CHATS, MESSAGES])
async def test_until_a_model_is_there_it_is_503(path: str) -> None:
    async with relayed() as (frontend, client):
        frontend.paths = []
        status, seconds, body = await answer(client, path)
        assert (status, seconds) == (503, "1")
        assert b"no model is served at the moment" in body
        frontend.models, frontend.paths = ["m"], [CHATS]
        assert (await answer(client))[0] == 200


async def test_what_the_graph_does_not_have_stays_404() -> None:
    async with relayed() as (frontend, client):
        frontend.models = ["m"]
        assert (await answer(client, model="other"))[:2] == (404, None)
        assert await answer(client, MESSAGES) == (404, None, b"")
        assert await answer(client, "/v1/other") == (404, None, b"")


async def test_a_model_that_is_lost_is_503() -> None:
    async with relayed() as (frontend, client):
        frontend.models = ["m", "n"]
        assert (await answer(client, model="other"))[0] == 404
        frontend.models = ["n"]
        assert (await answer(client))[:2] == (503, "1")
        assert (await answer(client, model="other"))[0] == 404
        frontend.models, frontend.paths = [], []
        assert (await answer(client))[:2] == (503, "1")


async def test_a_path_that_was_there_is_503_while_it_is_not() -> None:
    async with relayed() as (frontend, client):
        frontend.models = ["m"]
        assert (await answer(client))[0] == 200
        frontend.paths = []
        assert (await answer(client))[:2] == (503, "1")
