"""A small OpenAI endpoint with timings that a test sets: real sockets, no model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

Result = TypeVar("Result")


@dataclass
class Behaviour:
    """The fields that the endpoint understands, and how fast it answers.

    Attributes:
        answered_rounds: the rounds behind the first few never get an answer; the first of them sets `held_round`.
    """

    dynamo: bool = True
    completions: bool = True
    accepts_ignore_eos: bool = True
    tokens_per_chunk: int = 1
    first_s: float = 0.0
    session_first_s: float = 0.0
    gap_s: float = 0.0
    decision: dict[str, Any] | None = None
    fail_after_chunks: int | None = None
    answered_rounds: int | None = None
    status: int = 200
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    held_round: threading.Event = field(default_factory=threading.Event)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The requests that belong to sessions; probes have no session id."""
        return [body for body, sent in zip(self.requests, self.headers, strict=True) if "x-dynamo-session-id" in sent]


@contextmanager
def serve(behaviour: Behaviour) -> Iterator[str]:
    """Run the endpoint on a free port of this machine, in a thread; yields its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    runner = web.AppRunner(_app(behaviour), shutdown_timeout=0.1)
    try:
        run(runner.setup())
        run(web.TCPSite(runner, "127.0.0.1", 0).start())
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        run(runner.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _app(behaviour: Behaviour) -> web.Application:
    app = web.Application()
    app.router.add_get("/v1/models", partial(_models, behaviour))
    app.router.add_post("/v1/completions", partial(_generate, behaviour, False))
    app.router.add_post("/v1/chat/completions", partial(_generate, behaviour, True))
    return app


async def _models(behaviour: Behaviour, _: web.Request) -> web.Response:
    owner = "nvidia" if behaviour.dynamo else "someone"
    return web.json_response({"object": "list", "data": [{"id": "m", "owned_by": owner}]})


async def _generate(behaviour: Behaviour, chat: bool, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    refusal = _refusal(body, behaviour, chat=chat)
    if refusal is not None:
        return refusal
    behaviour.requests.append(body)
    behaviour.headers.append({name.lower(): value for name, value in request.headers.items()})
    if behaviour.status != 200 and "x-dynamo-session-id" in request.headers:
        return web.json_response({"message": "no live decode worker"}, status=behaviour.status)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    ids = [1000 + len(behaviour.requests) * 100 + index for index in range(body["max_tokens"])]
    behaviour.outputs.append(ids)
    in_session = "x-dynamo-session-id" in request.headers
    if behaviour.answered_rounds is not None and len(behaviour.rounds) > behaviour.answered_rounds:
        behaviour.held_round.set()
        await asyncio.Event().wait()
    await asyncio.sleep(behaviour.session_first_s if in_session else 0)
    await asyncio.sleep(behaviour.first_s)
    for number, start in enumerate(range(0, len(ids), behaviour.tokens_per_chunk)):
        if number:
            await asyncio.sleep(behaviour.gap_s)
        if in_session and behaviour.fail_after_chunks is not None and number >= behaviour.fail_after_chunks:
            await response.write(b'event: error\ndata: {"message": "worker died"}\n\ndata: [DONE]\n\n')
            return response
        await _event(response, _chunk(body, ids[start : start + behaviour.tokens_per_chunk], chat=chat))
    last: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(ids)}}
    if behaviour.decision is not None and "nvext" in body:
        last["nvext"] = {"engine_data": {"ampd": behaviour.decision}}
    await _event(response, last)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _refusal(body: dict[str, Any], behaviour: Behaviour, *, chat: bool) -> web.Response | None:
    if not chat and not behaviour.completions:
        return web.Response(status=404, text="not found")
    if not behaviour.dynamo and "nvext" in body:
        return web.json_response({"error": {"message": "unknown field nvext"}}, status=400)
    if not behaviour.accepts_ignore_eos and "ignore_eos" in body:
        return web.json_response({"error": {"message": "unknown field ignore_eos"}}, status=400)
    return None


def _chunk(body: dict[str, Any], ids: list[int], *, chat: bool) -> dict[str, Any]:
    text = "".join(f" t{item}" for item in ids)
    choice = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
    event: dict[str, Any] = {"choices": [choice], "usage": None}
    if "completion_token_ids" in body.get("nvext", {}).get("extra_fields", ()):
        event["nvext"] = {"completion_token_ids": ids}
    return event


async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
