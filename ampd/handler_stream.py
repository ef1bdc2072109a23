"""The answer of a Dynamo handler: one task makes its items, and Dynamo reads them at its own pace.

Dynamo reads an answer item by item. It calls `__anext__` in a thread of its own, and has the event loop await the
result. For an async generator, each item costs a new task, and a step through every generator below. Here one task runs
the whole handler. Dynamo gets a future of our own, so that an item which is waited for reaches it without another turn
of the loop. Items that nothing waits for yet are joined, so that a busy reader gets fewer and longer ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

ItemT = TypeVar("ItemT")

Send: TypeAlias = Callable[[ItemT], None]
"""Passes an item on. It never waits: the items of one answer fit into memory."""

Work: TypeAlias = Callable[[Send[ItemT]], Coroutine[Any, Any, None]]
"""A handler: it sends items until it returns, or raises the error that the reader gets after the last item."""

Chunk: TypeAlias = dict[str, Any]
"""A part of a round's output as Dynamo's frontend expects it."""

_PER_TOKEN = ("token_ids", "log_probs", "top_logprobs")
MOST_JOINED_TOKENS = 64
"""Each join copies the tokens that were joined before."""

_OF_TOKENS = frozenset(("index", *_PER_TOKEN))
"""The keys of a chunk that has tokens and nothing else."""


def has_only_tokens(chunk: Chunk) -> bool:
    """Whether a chunk has tokens and nothing that must not wait, such as the end of a choice."""
    return bool(chunk.get("token_ids")) and chunk.keys() <= _OF_TOKENS


def join_chunks(last: Chunk, chunk: Chunk) -> bool:
    """Add the tokens of a chunk to the chunk before it, which was not read yet; False: they cannot be one."""
    if not chunk.keys() <= _OF_TOKENS or "finish_reason" in last or last.get("index") != chunk.get("index"):
        return False
    if any((name in last) != (name in chunk) for name in _OF_TOKENS):
        return False
    if len(last.get("token_ids", ())) >= MOST_JOINED_TOKENS:
        return False
    for name in _PER_TOKEN:
        if name in chunk:
            last[name] = [*last[name], *chunk[name]]
    return True


class StopSignal(Protocol):
    """The part of Dynamo's `Context` that shows when the caller has gone."""

    def is_stopped(self) -> bool: ...

    def async_killed_or_stopped(self) -> Any:
        """A future that completes when the context is killed or stopped."""
        ...


class _Items(Generic[ItemT]):
    """The items that were sent and not read. It is the future of the next one, again and again.

    All methods but the constructor and `abandon` run in the event loop. `asyncio.isfuture` is true of it.
    """

    _asyncio_future_blocking = False

    def __init__(self, work: Work[ItemT], join: Callable[[ItemT, ItemT], bool], context: StopSignal | None) -> None:
        self._work: Work[ItemT] | None = work
        self._join = join
        self._context = context
        self._stopped: asyncio.Future[Any] | None = None
        self._waiting: deque[ItemT] = deque()
        self._reader: Callable[[_Items[ItemT]], object] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self._was_cancelled = False
        self._error: BaseException | None = None

    # -- the reader's side: what Dynamo uses of a future

    def add_done_callback(self, callback: Callable[[_Items[ItemT]], object]) -> None:
        """Call `callback` once, when there is an item or the end. That may be now."""
        self._start()
        if self.done():
            callback(self)
        else:
            self._reader = callback

    def done(self) -> bool:
        return bool(self._waiting) or self._is_over

    def result(self) -> ItemT:
        """The next item.

        Raises:
            StopAsyncIteration: there are no more.
        """
        if self._waiting:
            return self._waiting.popleft()
        error, self._error = self._error, None
        raise error or StopAsyncIteration

    def __await__(self) -> Generator[Any, None, ItemT]:
        self._start()
        while not self.done():
            yield from self._change()
        return self.result()

    def _change(self) -> asyncio.Future[None]:
        changed = asyncio.get_running_loop().create_future()

        def wake(_: object) -> None:
            if not changed.done():
                changed.set_result(None)

        self.add_done_callback(wake)
        return changed

    # -- the handler's side

    def send(self, item: ItemT) -> None:
        """Pass an item on."""
        if self._was_cancelled:
            # The cancellation can have been lost, for example in `asyncio.wait_for` of Python 3.11, which forgets it
            # where it meets an answer.
            if asyncio.current_task() is self._task:
                raise asyncio.CancelledError
            return
        if self._reader is None and self._waiting and self._join(self._waiting[-1], item):
            return
        self._waiting.append(item)
        self._wake()

    async def close(self) -> None:
        """End the handler, and wait until it has cleaned up."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait({self._task})

    def cancel(self) -> None:
        """Cancel the handler. A second call does nothing, because it would cut the clean-up short.

        A handler that is being cancelled for a reason of its own is cancelled all the same, because it may go on then.
        """
        self._work, self._is_over = None, True
        self._interrupt()

    def _interrupt(self) -> None:
        if self._task is not None and not self._was_cancelled:
            self._was_cancelled = True
            self._task.cancel()

    def abandon(self) -> None:
        """End the handler, because nothing will read on. Other threads may call this."""
        if self._task is not None and not self._task.done():
            with suppress(RuntimeError):  # the loop is closed
                self._task.get_loop().call_soon_threadsafe(self.cancel)

    def _start(self) -> None:
        if self._work is not None:
            # The handler's arguments are large. Only its frame holds them from now on.
            work, self._work = self._work, None
            self._task = asyncio.get_running_loop().create_task(work(self.send))
            self._task.add_done_callback(self._ended)
            if self._context is not None:
                self._stopped = asyncio.ensure_future(self._context.async_killed_or_stopped())
                self._stopped.add_done_callback(lambda _: self._interrupt())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._is_over = True
        if task.cancelled():
            self._error = None if self._was_cancelled else asyncio.CancelledError()
        else:
            self._error = task.exception()
        if self._stopped is not None:
            self._stopped.cancel()
        self._wake()

    def _wake(self) -> None:
        if (reader := self._reader) is not None:
            self._reader = None
            reader(self)


class HandlerStream(Generic[ItemT]):
    """What a handler returns to Dynamo. The handler begins with the first read, and is cancelled if this is dropped.

    Args:
        work: the handler.
        join: adds its second item to its first, which was not read yet, and returns whether it did.
        context: the handler is cancelled where it waits when this is stopped, because Dynamo waits for the next item.
    """

    def __init__(
        self,
        work: Work[ItemT],
        join: Callable[[ItemT, ItemT], bool] = lambda _last, _item: False,
        context: StopSignal | None = None,
    ) -> None:
        # Dynamo calls a handler outside of the event loop, so nothing may start here.
        self._items = _Items(work, join, context)

    def __aiter__(self) -> HandlerStream[ItemT]:
        return self

    def __anext__(self) -> _Items[ItemT]:
        return self._items

    def __del__(self) -> None:
        self._items.abandon()

    async def aclose(self) -> None:
        """End the handler, and wait until it has cleaned up."""
        await self._items.close()
