"""What the first events of a stream say."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from ampd.relay_mark import RelayMark
from ampd.wire import Refused, refusal_comment, refusal_text
from router.status_relay.first_events import first_events, refusal_of

OWN = b"event: response.created\ndata: {}\n\n"
FIRST = b"event: x\ndata: {}\n\n"
BEHIND = b"event: y\n\n"
REFUSED = Refused(429, "the queue is full")


async def read(*parts: bytes) -> bytes:
    """What is read of a stream that has these parts, and then ends."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    stream = aiohttp.StreamReader(protocol, 1 << 30, loop=loop)
    reading = asyncio.ensure_future(first_events(stream))
    for part in parts:
        for _ in range(2):  # until it waits for the next part
            await asyncio.sleep(0)
        if reading.done():
            break
        stream.feed_data(part)
    stream.feed_eof()
    return await reading


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_a_stream_is_read_up_to_the_first_event_that_is_not_the_frontends_own(size: int) -> None:
    whole = OWN + OWN + FIRST + BEHIND
    parts = [whole[start : start + size] for start in range(0, len(whole), size)]
    needed = len(OWN + OWN + FIRST)
    assert await read(*parts) == whole[: -(-needed // size) * size]


@pytest.mark.parametrize("whole", [b"", OWN, OWN + FIRST[:-1]])
async def test_a_stream_may_end_before(whole: bytes) -> None:
    assert await read(*([whole] * bool(whole))) == whole


async def test_a_long_first_event_takes_no_more_than_its_length() -> None:
    part, count = b"x" * 64, 100_000
    async with asyncio.timeout(60):  # far longer than it takes; all that has come, with each part, takes minutes
        got = await read(OWN, *[part] * count, b"\n\n", BEHIND)
    assert len(got) == len(OWN) + len(part) * count + 2


def text_event(text: str) -> bytes:
    return f"data: {json.dumps({'delta': {'text': text}})}\n\n".encode()


def test_only_a_text_that_begins_with_the_secret_is_a_refusal() -> None:
    mark, other = (RelayMark.fresh().question(as_text=True) for _ in range(2))
    assert refusal_of(text_event(refusal_text(REFUSED, str(mark))), mark) == REFUSED
    quoting = Refused(429, f"the queue is full, said {mark}")
    for forged in (
        refusal_text(quoting, str(other)),
        refusal_text(quoting, "y" * len(str(mark))),
        f" {refusal_text(REFUSED, str(mark))}",
        refusal_comment(quoting),
    ):
        assert refusal_of(text_event(forged), mark) is None
