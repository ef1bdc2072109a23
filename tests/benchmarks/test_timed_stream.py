"""What a benchmark says of a request that a graph does not serve, on a live graph with a modelled engine."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from ampd.errors import RunError
from benchmarks.timed_stream import timed_stream
from router.request import ANNOUNCEMENT
from tests.harness.graph import MODEL, Graph, profile

BODY: dict[str, Any] = {"model": MODEL, "prompt": [5] * 40, "max_tokens": 3, "stream": True}


@pytest.mark.slow
async def test_a_stream_is_timed_and_a_refusal_is_one_line_with_its_reason(graph: Graph) -> None:
    coordinator = graph.start_coordinator("always-local")
    graph.start_frontend()
    await graph.new_worker("decode", profile(graph.folder, prefill_s=0.001, long_prefill_s=0.001, step_s=0.001))
    await graph.until_answers([coordinator])
    first_s, whole_s = await timed_stream(graph.url, BODY, "x-dynamo-session-id: s\r\n")
    assert 0 < first_s <= whole_s
    # By the coordinator.
    with pytest.raises(RunError, match=r"did not serve a request: .* 400 Bad Request: .*needs a session id"):
        await timed_stream(graph.url, {**BODY, "nvext": {"annotations": [ANNOUNCEMENT]}}, "")
    # By the frontend.
    with pytest.raises(RunError, match=r"did not serve a request: .* 404 Not Found: Model not found"):
        await timed_stream(graph.url, {**BODY, "model": "nothing"}, "")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "no answer: ''"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n", "HTTP/1.1 200 OK: "),
        (b'HTTP/1.1 500 Oh\r\n\r\n{"message": "say \\"it\\"", "code": 500}', 'HTTP/1.1 500 Oh: say "it"'),
    ],
)
async def test_an_answer_that_breaks_off_is_quoted(answer: bytes, said: str) -> None:
    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(RunError, match=re.escape(f"{url} did not serve a request: {said}")):
            await timed_stream(url, BODY, "")
