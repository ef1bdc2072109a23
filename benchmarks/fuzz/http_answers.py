"""What commands get over HTTP: streams of an endpoint, its list of models, answers of coordinators and frontends."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import redirect_stdout
from itertools import pairwise
from typing import Any, cast
from unittest.mock import patch

import httpx

from ampd.cli.serve.command import Expected, _missing
from ampd.cli.session import run as run_session
from ampd.errors import RunError, UserError
from ampd.keys import session_key
from ampd.state.redis_store import StateStore
from ampd.types import Role, WorkerView
from benchmarks.fuzz.mutations import changed_bytes, changed_json
from benchmarks.fuzz.target import Target
from workloads.endpoint import Chunk, Dialect, Endpoint, RequestError

_CHAT: tuple[Any, ...] = (
    {"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Rome"}}], "usage": None},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}}]},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "text": None}]},
    {"choices": [{"index": 0, "text": "a", "token_ids": [5, 6]}]},
    {
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 4},
        "nvext": {"completion_token_ids": [7, 8], "engine_data": {"ampd": {"ttft_s": 0.5}}},
    },
)
_ERROR = {"error": {"message": "the model is full", "type": "server_error", "code": 503}}
_MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "nvidia"}, {"id": "n"}]}
_HEALTH = {"status": "healthy", "instances": [{"component": "coordinator", "endpoint": "generate", "namespace": "n"}]}
_KEY = session_key("", "s")
_ROW = {"session_key": _KEY, "session_id": "s", "tenant": "", "held_tokens": {"d1": 160}, "idle_s": 3.0}
_SESSIONS: dict[str, Any] = {
    "list": {"sessions": [_ROW, {**_ROW, "session_id": None, "idle_s": None}], "total": 3},
    "show": {**_ROW, "binding": {"worker_id": "d1", "epoch": 2}},
    "end": {"session_key": _KEY, "was_bound": True, "released_tokens": 160},
}
_ODD_STATUS = (204, 301, 400, 404, 429, 500, 503)
_DIALECT = Dialect("chat/completions")


def targets() -> Iterator[Target]:
    """The readers of answers."""
    yield Target("stream of an endpoint", _stream, _read_stream, (RequestError,))
    yield Target("list of models", lambda rng: _answer(rng, _MODELS), _choose, (UserError, RunError))
    yield Target("answer about sessions", _session_answer, _ask, (UserError, RunError))
    yield Target("answer about readiness", lambda rng: (_answer(rng, _MODELS), _answer(rng, _HEALTH)), _ready, ())


def _answer(rng: random.Random, value: Any) -> httpx.Response:
    """Mostly of status 200."""
    data = changed_json(rng, value).encode("utf-8", "surrogatepass")
    data = changed_bytes(rng, data) if rng.random() < 0.1 else data
    return httpx.Response(rng.choice(_ODD_STATUS) if rng.random() < 0.1 else 200, content=data)


# -- streams


class _Pieces(httpx.AsyncByteStream):
    """A body in pieces; after the last one the connection breaks, if `breaks`."""

    def __init__(self, pieces: list[bytes], *, breaks: bool) -> None:
        self._pieces = pieces
        self._breaks = breaks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece
        if self._breaks:
            raise httpx.RemoteProtocolError("the peer closed the connection")


def _stream(rng: random.Random) -> tuple[int, list[bytes], bool]:
    """(status, pieces of the body, whether it breaks off)."""
    lines = [": a comment", "event: message"] if rng.random() < 0.3 else []
    wrong = rng.randrange(len(_CHAT))
    for number, event in enumerate(_CHAT):
        lines += [f"data: {changed_json(rng, event) if number == wrong else json.dumps(event)}", ""]
    if rng.random() < 0.2:
        lines += ["event: error", f"{rng.choice(('data', ''))}: {changed_json(rng, _ERROR)}", ""]
    data = "\n".join([*lines, "data: [DONE]", "", ""]).encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        data = changed_bytes(rng, data)
    breaks = rng.random() < 0.4
    status = rng.choice(_ODD_STATUS) if rng.random() < 0.1 else 200
    return status, pieces(rng, data[: rng.randint(0, len(data))] if breaks else data), breaks


def pieces(rng: random.Random, data: bytes) -> list[bytes]:
    """A text cut at up to four bytes."""
    cuts = sorted({0, len(data), *(rng.randint(0, len(data)) for _ in range(rng.randint(0, 4)))})
    return [data[start:end] for start, end in pairwise(cuts)]


def _read_stream(given: tuple[int, list[bytes], bool]) -> None:
    status, parts, breaks = given
    asyncio.run(_read_whole(lambda _: httpx.Response(status, stream=_Pieces(parts, breaks=breaks))))
    # A stream that breaks off is no complete one.
    assert not breaks or b"[DONE]" in b"".join(parts)


async def _read_whole(answer: Callable[[httpx.Request], httpx.Response]) -> None:
    async with _endpoint(answer) as endpoint:
        chunks = [chunk async for chunk in endpoint.stream(_DIALECT, {"model": "m"}, {})]
    for chunk in chunks:
        _check(chunk)


def _check(chunk: Chunk) -> None:
    """The figures of a report can be made of it."""
    assert isinstance(chunk.text, str)
    assert chunk.token_ids is None or all(type(token_id) is int for token_id in chunk.token_ids)
    dict(chunk.usage), dict(chunk.engine_data)


def _endpoint(answer: Callable[[httpx.Request], httpx.Response]) -> Endpoint:
    endpoint = Endpoint.__new__(Endpoint)  # its own client would load certificates each time
    endpoint.base = "http://localhost:1"
    endpoint._client = httpx.AsyncClient(
        base_url=f"{endpoint.base}/v1/", transport=httpx.MockTransport(answer), trust_env=False
    )
    return endpoint


def _choose(answer: httpx.Response) -> None:
    async def choose() -> tuple[str, bool]:
        async with _endpoint(lambda _: answer) as endpoint:
            return await endpoint.choose_model(None)

    name, is_dynamo = asyncio.run(choose())
    assert isinstance(name, str)
    assert isinstance(is_dynamo, bool)


# -- the system port of a coordinator, and a frontend


def _session_answer(rng: random.Random) -> tuple[str, httpx.Response]:
    operation = rng.choice(tuple(_SESSIONS))
    value = _SESSIONS[operation] if rng.random() < 0.95 else {"error": "no such session"}
    return operation, _answer(rng, value)


def _ask(given: tuple[str, httpx.Response]) -> None:
    operation, answer = given
    answer.request = httpx.Request("POST", "http://localhost:1")
    words = [] if operation == "list" else ["s"]
    message = ""
    with patch("httpx.post", lambda *_, **__: answer), redirect_stdout(io.StringIO()) as shown:
        try:
            assert run_session([operation, *words, "--coordinator-url", "http://localhost:1"]) == 0
        except (UserError, RunError) as error:
            message = str(error)
            raise
        finally:
            # Nothing moves the cursor of a terminal.
            assert all(line.isprintable() for line in (*shown.getvalue().splitlines(), message))


class _OneWorker:
    async def snapshot(self) -> list[WorkerView]:
        return [WorkerView("d1", Role.DECODE)]


def _ready(answers: tuple[httpx.Response, httpx.Response]) -> None:
    models, health = answers
    by_path = {"/v1/models": models, "/health": health}

    async def missing() -> str:
        transport = httpx.MockTransport(lambda request: by_path[request.url.path])
        async with httpx.AsyncClient(base_url="http://localhost:1", transport=transport, trust_env=False) as client:
            return await _missing(cast(StateStore, _OneWorker()), client, Expected("", "m", {Role.DECODE: 1}))

    assert asyncio.run(missing()) in ("", "the model at the frontend", "1 coordinator(s) at the frontend")
