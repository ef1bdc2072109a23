"""A caller that goes away: the work ends where it waits."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import pytest

from ampd.handler_stream import HandlerStream, Send, StopSignal
from tests.virtual_time import run_virtually


def until_stopped(source: AsyncGenerator[int, None], signal: StopSignal) -> HandlerStream[int]:
    """The items of a handler, which is cancelled where it waits."""

    async def work(send: Send[int]) -> None:
        async with aclosing(source):
            async for item in source:
                send(item)

    return HandlerStream(work, context=signal)


class Signal:
    """Dynamo's context as far as cancellation goes."""

    def __init__(self) -> None:
        self.stopped: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def is_stopped(self) -> bool:
        return self.stopped.done()

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        return asyncio.shield(self.stopped)


class Work:
    """A round that yields `count` items, waits for ever, and notes how it ended."""

    def __init__(self, count: int = 0, error: Exception | None = None, clean_up: asyncio.Event | None = None) -> None:
        self._count, self._error, self._clean_up = count, error, clean_up
        self.ended_by: type[BaseException] | None = None
        self.cleaned = False

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for item in range(self._count):
                yield item
            if self._error:
                raise self._error
            await asyncio.Event().wait()
        except BaseException as error:
            self.ended_by = type(error)
            raise
        finally:
            if self._clean_up:
                await self._clean_up.wait()
            self.cleaned = True


async def test_a_wait_is_cancelled_when_the_caller_goes() -> None:
    signal, work = Signal(), Work(count=2)
    seen = []
    async with asyncio.timeout(60):
        async for item in until_stopped(work.run(), signal):
            seen.append(item)
            if item == 1:
                signal.stopped.set_result(True)
    assert seen == [0, 1]
    assert work.ended_by is asyncio.CancelledError
    assert work.cleaned


async def test_errors_come_through() -> None:
    work = Work(count=1, error=ZeroDivisionError("no"))
    with pytest.raises(ZeroDivisionError):
        async for _ in until_stopped(work.run(), Signal()):
            pass
    assert work.cleaned


def test_a_second_cancellation_does_not_cut_the_clean_up_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time, where a sleep ends when there is nothing else left to do."""

    async def scenario() -> None:
        signal, clean_up = Signal(), asyncio.Event()
        work = Work(clean_up=clean_up)

        async def consume() -> None:
            async for _ in until_stopped(work.run(), signal):
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(1)
        signal.stopped.set_result(True)
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.sleep(1)
        assert work.ended_by is asyncio.CancelledError
        assert not work.cleaned
        clean_up.set()
        await asyncio.wait({task})
        assert work.cleaned

    run_virtually(scenario(), monkeypatch)


async def test_a_cancellation_that_is_lost_costs_one_item() -> None:
    """`asyncio.wait_for` of Python 3.11 forgets a cancellation that meets an answer."""
    signal = Signal()
    closed = asyncio.Event()

    async def forgetful() -> AsyncGenerator[int, None]:
        try:
            for item in range(1000):
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
                yield item
        finally:
            closed.set()

    seen = []
    async for item in until_stopped(forgetful(), signal):
        seen.append(item)
        if not signal.is_stopped():
            signal.stopped.set_result(True)
    assert len(seen) < 10
    assert closed.is_set()


def test_a_caller_that_drops_its_stream_does_not_cut_the_clean_up_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the wait for the signal is a task, which ends some turns after it was cancelled."""

    class TaskSignal(Signal):
        def async_killed_or_stopped(self) -> asyncio.Future[bool]:
            async def wait() -> bool:
                return await self.stopped

            return asyncio.create_task(wait())

    async def scenario() -> None:
        clean_up = asyncio.Event()
        work = Work(count=1, clean_up=clean_up)
        items = until_stopped(work.run(), TaskSignal())
        await anext(items)
        closing = asyncio.create_task(items.aclose())
        await asyncio.sleep(1)
        assert work.ended_by is asyncio.CancelledError
        assert not work.cleaned
        assert not closing.done()
        clean_up.set()
        await closing
        assert work.cleaned

    run_virtually(scenario(), monkeypatch)


async def test_a_lost_cancellation_does_not_leave_the_work_going_on() -> None:
    """The caller drops its stream. The work forgets its cancellation and goes on making items."""
    closed = asyncio.Event()

    async def forgetful() -> AsyncGenerator[int, None]:
        try:
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
                yield 0
        finally:
            closed.set()

    items = until_stopped(forgetful(), Signal())
    await anext(items)
    async with asyncio.timeout(60):
        await items.aclose()
    assert closed.is_set()


async def test_no_item_is_lost_to_a_slow_caller() -> None:
    count = 800
    work = Work(count, error=ZeroDivisionError("no"))
    seen = []

    async def read() -> None:
        async for item in until_stopped(work.run(), Signal()):
            seen.append(item)
            await asyncio.sleep(0)

    with pytest.raises(ZeroDivisionError):
        await read()
    assert seen == list(range(count))
