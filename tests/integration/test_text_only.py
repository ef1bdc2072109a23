"""Images, audio and embeddings are refused on every path, because the keys of KV name tokens only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.harness.graph import MODEL, Graph, chat, completion, profile
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)
SOUND = "data:audio/wav;base64,UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA="
TEXT = {"type": "text", "text": "What is this?"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(graph: Graph) -> AsyncIterator[httpx.AsyncClient]:
    """Of a graph with one worker."""
    coordinator = graph.start_coordinator("always-local")
    graph.start_frontend()
    await graph.new_worker("decode", profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.002))
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        yield client


def chat_with(part: dict[str, Any], **options: Any) -> dict[str, Any]:
    return chat([{"role": "user", "content": [TEXT, part]}], max_tokens=4, **options)


IMAGE = {"type": "image_url", "image_url": {"url": PIXEL}}
VOICE = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TOKENS = list(range(100, 150))
"""A prompt that the client has tokenized itself."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", chat_with(IMAGE)),
        ("completions", completion("hello", max_tokens=4, prompt_embeds="A" * 400)),
        ("chat/completions", chat_with({"type": "video_url", "video_url": {"url": "http://127.0.0.1:1/a.mp4"}})),
        ("chat/completions", chat_with({"type": "audio_url", "audio_url": {"url": SOUND}})),
        ("chat/completions", chat_with(IMAGE) | {"nvext": {"token_data": TOKENS}}),
        ("responses", {"model": MODEL, "max_output_tokens": 4, "input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": PIXEL}
        ]}]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_text_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], stream: bool
) -> None:
    reply = await client.post(f"/v1/{path}", json={**body, "stream": stream})
    assert reply.status_code == 400, reply.text
    assert "text only" in reply.text


async def test_the_frontend_itself_refuses_a_picture_that_it_would_have_to_fetch(client: httpx.AsyncClient) -> None:
    body = chat_with({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}})
    reply = await client.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["message"]) == (400, "Invalid request")


async def test_a_part_that_the_frontend_leaves_out_changes_nothing(client: httpx.AsyncClient) -> None:
    replies = [
        await client.post("/v1/chat/completions", json=body)
        for body in (
            chat([{"role": "user", "content": [TEXT]}], max_tokens=4),
            chat_with(VOICE),
            chat([{"role": "user", "content": [TEXT]}], max_tokens=4) | {"nvext": {"token_data": TOKENS}},
        )
    ]
    assert [reply.status_code for reply in replies] == [200, 200, 200]
    alone, with_voice, _ = (reply.json() for reply in replies)
    assert with_voice["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert with_voice["choices"][0]["message"] == alone["choices"][0]["message"]
