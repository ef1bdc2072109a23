"""Rounds that nothing reads any more are closed; all others are left alone."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from router.rounds_in_progress import RoundsInProgress
from tests.router.replica_lab import FakeContext


class Source:
    """Chunks of a round; each one waits until it is `given`."""

    def __init__(self) -> None:
        self.given = asyncio.Event()
        self.is_closed = False

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        try:
            while True:
                await self.given.wait()
                yield {}
        finally:
            self.is_closed = True


async def test_a_round_that_is_not_read_after_its_client_has_gone_is_closed() -> None:
    rounds, context, source = RoundsInProgress(), FakeContext(), Source()
    source.given.set()
    round_ = rounds.enter(context)
    round_.chunks = source.chunks()
    await anext(round_.chunks)
    await rounds.close_unread()
    await rounds.close_unread()
    assert len(rounds) == 1, "a client that reads slowly keeps its round"
    context.stop_generating()
    await rounds.close_unread()
    assert not source.is_closed, "it may be about to end by itself"
    await rounds.close_unread()
    assert source.is_closed
    await asyncio.wait_for(rounds.drained(), 1.0)
    rounds.leave(round_)
    assert len(rounds) == 0


async def test_a_round_that_is_read_is_left_to_its_reader() -> None:
    rounds, context, source = RoundsInProgress(), FakeContext(), Source()
    round_ = rounds.enter(context)
    await rounds.close_unread()  # it has no chunks yet
    round_.chunks = source.chunks()
    reading = asyncio.ensure_future(anext(round_.chunks))
    await asyncio.sleep(0)
    context.stop_generating()
    for _ in range(3):
        await rounds.close_unread()
    assert not source.is_closed
    assert len(rounds) == 1
    source.given.set()
    await reading


async def test_a_round_whose_reader_comes_back_while_it_is_closed_stays(caplog: pytest.LogCaptureFixture) -> None:
    rounds, context, source = RoundsInProgress(), FakeContext(), Source()
    round_ = rounds.enter(context)
    round_.chunks = source.chunks()
    source.given.set()
    await anext(round_.chunks)
    source.given.clear()
    context.stop_generating()
    await rounds.close_unread()
    closing = asyncio.create_task(rounds.close_unread())
    reading = asyncio.create_task(anext(round_.chunks))  # it runs after the check, and before the round is closed
    await closing
    assert len(rounds) == 1
    assert caplog.text == ""
    source.given.set()
    await reading


async def test_a_round_that_cannot_be_closed_counts_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    rounds, context = RoundsInProgress(), FakeContext()

    async def stubborn() -> AsyncGenerator[dict[str, Any], None]:
        try:
            yield {}
        finally:
            raise ValueError("no")

    round_ = rounds.enter(context)
    round_.chunks = stubborn()
    await anext(round_.chunks)
    context.stop_generating()
    await rounds.close_unread()
    await rounds.close_unread()
    assert len(rounds) == 0
    assert "could not be closed" in caplog.text
