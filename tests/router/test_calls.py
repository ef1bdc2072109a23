"""Calls to workers: what a failure counts as, and which calls end with their round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ampd.call_signatures import Signer
from ampd.wire import GENERATE_ENDPOINT, KV_ENDPOINT, KvRequest, error_text, with_engine_start
from router.calls import WorkerCalls, worker_error
from router.round_errors import WorkerLostError, WorkerRefusedError
from tests.router.replica_lab import FakeContext
from tests.virtual_time import run_virtually

MATCH: KvRequest = {"op": "match", "keys": []}


RESET = Exception("Unavailable: TCP connection to 127.0.0.1:1 failed")
"""Of Dynamo, if the connection to a worker was reset."""


class Client:
    """Dynamo's client of an endpoint; `start` is what happens to a call, or the replies that it gets.

    Args:
        resets: calls that meet a reset connection before that.

    Attributes:
        calls: (request, worker's number) of each call. contexts: of each call.
    """

    def __init__(self, start: Exception | list[Any], resets: int = 0) -> None:
        self._start = start
        self._resets = resets
        self.calls: list[tuple[Any, int]] = []
        self.contexts: list[Any] = []

    async def direct(self, request: Any, number: int, *, annotated: bool, context: Any) -> AsyncIterator[Any]:
        assert not annotated
        self.calls.append((request, number))
        self.contexts.append(context)
        if len(self.calls) <= self._resets:
            raise RESET
        if isinstance(self._start, Exception):
            raise self._start
        return self._replies(self._start)

    async def _replies(self, replies: list[Any]) -> AsyncIterator[Any]:
        for reply in replies:
            if reply is None:
                await asyncio.Event().wait()
            if isinstance(reply, Exception):
                raise reply
            yield reply


def calls(start: Exception | list[Any], resets: int = 0) -> tuple[WorkerCalls, Client]:
    client = Client(start, resets)
    endpoints = (GENERATE_ENDPOINT, KV_ENDPOINT)
    return WorkerCalls(dict.fromkeys(endpoints, client), Signer((), "c")), client


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(error_text(400, "bad grammar")), WorkerRefusedError("w", 400, "bad grammar")),
        (RuntimeError(error_text(503, "full")), WorkerRefusedError("w", 503, "full")),
        (RuntimeError(error_text(502, "SGLang has ended")), WorkerLostError("w", "SGLang has ended", has_died=True)),
        (
            RuntimeError(error_text(502, with_engine_start("SGLang has ended", 3))),
            WorkerLostError("w", "SGLang has ended (start 3 of the engine)", has_died=True, start=3),
        ),
        (ConnectionError("reset\nby peer"), WorkerLostError("w", "reset by peer")),
        (
            RuntimeError('Backend<Http>: {"message": "ampd-error 429: slow down", "code": 500}'),
            WorkerRefusedError("w", 429, "slow down"),
        ),
    ],
)
def test_a_failure_is_a_refusal_with_its_status_or_a_loss(error: Exception, expected: Exception) -> None:
    found: Any = worker_error("w", error)
    assert (type(found), str(found), vars(found)) == (type(expected), str(expected), vars(expected))
    assert worker_error("w", found) is found


async def test_a_call_goes_to_the_worker_with_that_id_in_hexadecimal() -> None:
    dynamo, client = calls([{"token_ids": [1]}])
    assert [chunk async for chunk in await dynamo.generate("ff", {"a": 1}, FakeContext())] == [{"token_ids": [1]}]
    assert await dynamo.kv("10", MATCH, 1.0) == {"token_ids": [1]}
    assert client.calls == [({"a": 1}, 255), (MATCH, 16)]


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (ConnectionError("reset"), "worker 1: reset"),
        ([ConnectionError("reset")], "worker 1: reset"),
        ([], "worker 1: empty answer about KV"),
        ([None], "worker 1: no answer about KV within 30 s"),
    ],
)
def test_a_worker_that_gives_no_answer_about_kv_is_lost(
    start: Exception | list[Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        with pytest.raises(WorkerLostError) as lost:
            await calls(start)[0].kv("1", MATCH, 30.0)
        assert str(lost.value) == message

    run_virtually(ask(), monkeypatch)


def test_a_call_about_kv_that_nobody_waits_for_any_more_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(asking_s: float) -> Any:
        dynamo, client = calls([None])
        asking = asyncio.create_task(dynamo.kv("1", MATCH, 30.0))
        await asyncio.sleep(asking_s)
        assert not client.contexts[0].is_stopped()
        asking.cancel()
        await asyncio.wait({asking})
        return client.contexts[0]

    async def time_out() -> Any:
        dynamo, client = calls([None])
        with pytest.raises(WorkerLostError):
            await dynamo.kv("1", MATCH, 30.0)
        return client.contexts[0]

    assert run_virtually(ask(29.0), monkeypatch).is_stopped()
    assert run_virtually(time_out(), monkeypatch).is_stopped()


async def test_a_call_that_meets_a_reset_connection_is_made_once_more() -> None:
    dynamo, client = calls([{"token_ids": [1]}], resets=1)
    assert [chunk async for chunk in await dynamo.generate("ff", {"a": 1}, FakeContext())] == [{"token_ids": [1]}]
    assert client.calls == [({"a": 1}, 255)] * 2
    dynamo, client = calls([{"matched": 1}], resets=1)
    assert await dynamo.kv("ff", MATCH, 1.0) == {"matched": 1}


@pytest.mark.parametrize(
    ("start", "resets", "made"),
    [([], 2, 2), (RuntimeError(error_text(503, "full")), 0, 1), (RuntimeError(error_text(503, "full")), 1, 2)],
)
async def test_a_second_reset_connection_and_every_other_failure_is_final(start: Any, resets: int, made: int) -> None:
    dynamo, client = calls(start, resets)
    with pytest.raises((WorkerLostError, WorkerRefusedError)):
        await dynamo.generate("ff", {"a": 1}, FakeContext())
    assert len(client.calls) == made


@pytest.mark.parametrize("answer", [{"error": "the call is not signed"}, "nonsense", 7])
async def test_an_answer_about_kv_that_is_none_is_a_refusal(answer: Any) -> None:
    with pytest.raises(WorkerRefusedError, match="worker 1: no answer about KV"):
        await calls([answer])[0].kv("1", MATCH, 30.0)


async def test_a_call_that_cannot_start_is_a_failure_of_its_worker() -> None:
    dynamo, _ = calls(RuntimeError(error_text(503, "full")))
    with pytest.raises(WorkerRefusedError, match="full"):
        await dynamo.generate("1", {}, FakeContext())
