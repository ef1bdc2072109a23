"""How long and how late the headers of a request may be."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import suppress

import aiohttp
import httpx
import pytest

from router.status_relay import guards
from tests.router.status_relay.serving import connected
from tests.router.status_relay.test_hostile_clients import END, answers, relayed
from tests.waiting import until

CHUNK = b"x" * 60_000


def headers(count: int) -> bytes:
    return b"".join(b"x-%d: %s\r\n" % (number, CHUNK) for number in range(count))


async def test_headers_that_are_too_long_in_all_are_refused_before_they_end() -> None:
    async with relayed() as (frontend, url):
        answer = await answers(url, b"GET /whole HTTP/1.1\r\n" + headers(6))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert "256 KiB" in json.loads(body)["error"]["message"]
        assert frontend.asked == []


async def test_usual_long_headers_and_bodies_are_served_again_and_again() -> None:
    async with relayed() as (frontend, url), aiohttp.ClientSession(url) as client:
        long = {"authorization": "Bearer " + "x" * 16_000, "cookie": "y" * 60_000}
        for _ in range(5):
            async with client.post("/whole", data=io.BytesIO(b"z" * (3 << 20)), headers=long) as answer:
                assert answer.status == 200
        assert [len(body) for *_, body in frontend.asked] == [3 << 20] * 5


@pytest.mark.parametrize("before", [b"", b"GET /whole HTTP/1.1\r\nHost: a\r\n\r\n"])
async def test_a_head_that_does_not_end_is_given_up(before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "PATIENCE_S", 1.0)
    async with relayed() as (_, url):
        reader, writer = await connected(url)
        if before:
            writer.write(before)
            assert await reader.readuntil(b"}")
        writer.write(b"GET /who")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_a_connection_waits_for_its_next_request_and_a_stream_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guards, "PATIENCE_S", 0.5)
    async with relayed() as (frontend, url):
        reader, writer = await connected(url)
        writer.write(b"GET /whole HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await reader.readuntil(b"}")
        await asyncio.sleep(1.2)
        frontend.go_on.clear()
        writer.write(b"POST /stream HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        await reader.readuntil(b'"a": 1}')
        writer.write(b"GET /whole HTTP/1.1\r\n" + END)  # it waits for its turn
        await asyncio.sleep(1.2)
        frontend.go_on.set()
        rest = await reader.read()
        assert b"[DONE]" in rest
        assert b"HTTP/1.1 200" in rest
        writer.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"OPTIONS * HTTP/1.1\r\n", 404),
        (b"POST /whole HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n", 400),
        (b"GET /whole HTTP/1.1\r\nsecret\x00: secret\r\n", 400),
        (b"SECRET /whole HTTP/1.1\r\n", 400),
        (b"\x16\x03\x01\x02secret", 400),  # TLS
    ],
)
async def test_errors_of_the_server_have_the_form_of_the_api(request_: bytes, status: int) -> None:
    async with relayed() as (frontend, url):
        head, _, body = (await answers(url, request_ + END)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 ")
        assert int(head.split()[1]) == status
        assert b"server:" not in head.lower()
        assert b"secret" not in body
        assert json.loads(body)["error"]["code"] == status
        assert frontend.asked == []


async def test_a_connection_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "SILENCE_S", 0.2)
    async with relayed() as (_, url):
        reader, writer = await connected(url)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_a_head_that_begins_late_has_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "SILENCE_S", 3.0)
    async with relayed() as (_, url):
        reader, writer = await connected(url)
        writer.write(b"GET /whole HTTP/1.1\r\n")
        await asyncio.sleep(3.5)
        writer.write(END)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_connections_beyond_the_bound_are_told_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(guards, "RESERVED_CONNECTIONS", 0)
    async with relayed() as (_, url):
        held = [await connected(url) for _ in range(2)]
        for reader, writer in held:
            writer.write(b"GET /whole HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        refused, writer = await connected(url)
        answer = await refused.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 5\r\n" in answer
        writer.close()
        held[0][1].close()

        async def is_served() -> bool:
            return (await answers(url, b"GET /whole HTTP/1.1\r\n" + END)).startswith(b"HTTP/1.1 200 ")

        await until(is_served)
        held[1][1].close()


@pytest.mark.parametrize("reserved", [0, 1])
async def test_a_client_that_still_sends_its_body_reads_that_there_is_no_room(
    reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "MOST_CONNECTIONS", 0)
    monkeypatch.setattr(guards, "RESERVED_CONNECTIONS", reserved)
    async with relayed() as (_, url), httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{url}/whole", content=CHUNK)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


async def test_a_client_that_is_refused_and_sends_on_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MOST_CONNECTIONS", 0)
    monkeypatch.setattr(guards, "RESERVED_CONNECTIONS", 0)
    monkeypatch.setattr(guards, "_READING_S", 0.2)
    async with relayed() as (_, url):
        _, writer = await connected(url)

        async def is_given_up() -> bool:
            writer.write(CHUNK)
            return writer.transport.is_closing()

        await until(is_given_up)
        writer.close()


async def test_probes_are_answered_when_clients_hold_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MOST_CONNECTIONS", 0)
    monkeypatch.setattr(guards, "RESERVED_S", 3.0)
    async with relayed() as (_, url):
        reader, writer = await connected(url)
        writer.write(b"GET /whole HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        with suppress(ConnectionResetError):
            await reader.read()  # it ends soon, although it could be used again
        writer.close()
