"""The answer of a handler: no item is lost, no handler outlives its reader, and a slow reader gets longer chunks."""

import asyncio
import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ampd.handler_stream import Chunk, HandlerStream, Send, join_chunks
from tests.waiting import until


def counting(count: int, send_next: Callable[[], Any] | None = None) -> Callable[[Send[int]], Any]:
    """A handler that sends the numbers below `count`."""

    async def serve(send: Send[int]) -> None:
        for number in range(count):
            if send_next is not None:
                await send_next()
            send(number)

    return serve


@pytest.mark.parametrize("waits", [False, True], ids=["all at once", "one by one"])
async def test_the_items_come_in_order_and_end(waits: bool) -> None:
    stream = HandlerStream(counting(100, (lambda: asyncio.sleep(0)) if waits else None))
    assert [item async for item in stream] == list(range(100))
    assert [item async for item in stream] == []


async def test_the_error_comes_after_the_last_item() -> None:
    async def serve(send: Send[int]) -> None:
        send(1)
        send(2)
        raise ValueError("no")

    stream = HandlerStream(serve)
    assert [await anext(stream), await anext(stream)] == [1, 2]
    with pytest.raises(ValueError, match="no"):
        await anext(stream)


async def test_it_begins_with_the_first_read() -> None:
    has_begun = False

    async def serve(send: Send[int]) -> None:
        nonlocal has_begun
        has_begun = True
        send(1)

    stream = HandlerStream(serve)
    await asyncio.sleep(0)
    assert not has_begun
    assert await anext(stream) == 1
    unread = HandlerStream(serve)
    await unread.aclose()
    assert [item async for item in unread] == []


async def test_it_is_a_future_of_its_next_item() -> None:
    """As Dynamo reads it: from another thread, with `ensure_future`, `add_done_callback` and `result`."""
    loop, go = asyncio.get_running_loop(), asyncio.Event()
    stream = HandlerStream(counting(3, go.wait))
    read: list[int | None] = []
    over = asyncio.Event()

    def completed(future: Any) -> None:
        assert future.done()
        try:
            read.append(future.result())
        except StopAsyncIteration:
            over.set()
        else:
            threading.Thread(target=ask).start()

    def ask() -> None:
        next_item = stream.__anext__()
        loop.call_soon_threadsafe(lambda: asyncio.ensure_future(next_item).add_done_callback(completed))

    await asyncio.to_thread(ask)
    await asyncio.sleep(0)
    assert read == []
    go.set()
    async with asyncio.timeout(60):
        await over.wait()
    assert read == [0, 1, 2]


async def test_an_item_that_a_reader_missed_is_read_by_the_next() -> None:
    go = asyncio.Event()
    stream = HandlerStream(counting(2, go.wait))

    async def read() -> int:
        return await anext(stream)

    given_up = asyncio.create_task(read())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait({given_up})
    go.set()
    assert [item async for item in stream] == [0, 1]


class Endless:
    """A handler that sends one item and waits; `goes_on` lets its clean-up end."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.was_cancelled = self.is_over = False

    async def serve(self, send: Send[int]) -> None:
        try:
            send(1)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        finally:
            await self.goes_on.wait()
            self.is_over = True


async def test_to_close_it_waits_for_the_clean_up() -> None:
    handler = Endless()
    stream = HandlerStream(handler.serve)
    await anext(stream)
    closing = [asyncio.create_task(stream.aclose()) for _ in range(2)]
    await until(lambda: handler.was_cancelled)
    assert not any(task.done() for task in closing)
    assert not handler.is_over
    handler.goes_on.set()
    await asyncio.gather(*closing)
    assert handler.is_over
    assert [item async for item in stream] == []


async def test_a_handler_that_is_being_cancelled_for_another_reason_ends_with_its_stream() -> None:
    """As the guard of a call does it: it cancels the handler's wait, and the handler goes on."""
    tasks: list[asyncio.Task[None]] = []

    async def serve(send: Send[int]) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        send(1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if task.uncancel():
                raise
        await asyncio.Event().wait()

    stream = HandlerStream(serve)
    await anext(stream)
    (task,) = tasks
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(60):
        await stream.aclose()
    assert task.cancelled()


async def test_it_is_cancelled_when_it_is_dropped() -> None:
    handler = Endless()
    handler.goes_on.set()
    stream = HandlerStream(handler.serve)
    await anext(stream)
    held = [stream]
    del stream
    await asyncio.to_thread(held.clear)
    gc.collect()
    await until(lambda: handler.is_over)
    assert handler.was_cancelled


async def test_the_arguments_of_a_handler_are_released_when_it_drops_them() -> None:
    class Large:
        pass

    freed = asyncio.Event()

    async def serve(send: Send[bool], large: Large | None) -> None:
        assert large is not None
        large = None
        await asyncio.sleep(0)
        send(True)

    class Watched(Large):
        def __del__(self) -> None:
            freed.set()

    stream: HandlerStream[bool] = HandlerStream(partial(serve, large=Watched()))
    await anext(stream)
    assert freed.is_set()


# -- joined chunks


def chunk(*token_ids: int, **fields: Any) -> Chunk:
    return {"token_ids": list(token_ids), "index": 0, **fields}


async def test_a_slow_reader_gets_the_tokens_of_several_chunks_at_once() -> None:
    async def serve(send: Send[Chunk]) -> None:
        for number in range(10):
            send(chunk(number))
        send(chunk(10, finish_reason="stop"))

    stream = HandlerStream(serve, join_chunks)
    first, *rest = [part async for part in stream]
    assert first["token_ids"] == list(range(10))
    assert [part["token_ids"] for part in rest] == [[10]]
    assert rest[0]["finish_reason"] == "stop"


async def test_many_chunks_are_joined_by_the_dozen() -> None:
    async def serve(send: Send[Chunk]) -> None:
        for number in range(200):
            send(chunk(number))

    parts = [part["token_ids"] async for part in HandlerStream(serve, join_chunks)]
    assert [len(part) for part in parts] == [64, 64, 64, 8]
    assert [token for part in parts for token in part] == list(range(200))


async def test_a_reader_that_waits_gets_each_chunk_at_once() -> None:
    go = asyncio.Semaphore(0)

    async def serve(send: Send[Chunk]) -> None:
        for number in range(10):
            await go.acquire()
            send(chunk(number))

    stream = HandlerStream(serve, join_chunks)
    for number in range(10):
        reading = asyncio.ensure_future(stream.__anext__())
        go.release()
        async with asyncio.timeout(60):
            assert (await reading)["token_ids"] == [number]


@pytest.mark.parametrize(
    ("last", "following", "joined"),
    [
        (chunk(1), chunk(2), chunk(1, 2)),
        (chunk(1, worker_trace_link={"trace_id": "t"}), chunk(2), chunk(1, 2, worker_trace_link={"trace_id": "t"})),
        (
            chunk(1, log_probs=[-1.0], top_logprobs=[[{"token_id": 1}]]),
            chunk(2, log_probs=[-2.0], top_logprobs=[[{"token_id": 2}]]),
            chunk(1, 2, log_probs=[-1.0, -2.0], top_logprobs=[[{"token_id": 1}], [{"token_id": 2}]]),
        ),
        (chunk(1), {**chunk(2), "index": 1}, None),
        (chunk(1), chunk(2, finish_reason="length"), None),
        (chunk(1, finish_reason="stop"), chunk(2), None),
        (chunk(1), chunk(2, log_probs=[-2.0]), None),
        (chunk(1), chunk(2, engine_data={}), None),
        (chunk(1), chunk(2, ampd={}), None),
    ],
)
def test_chunks_are_joined_only_where_nothing_is_lost(last: Chunk, following: Chunk, joined: Chunk | None) -> None:
    before, given = dict(last), list(last["token_ids"])
    assert join_chunks(last, following) == (joined is not None)
    assert last == (before if joined is None else joined)
    assert before["token_ids"] == given, "the list itself may belong to the sender"
