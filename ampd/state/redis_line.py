"""One connection to Redis for many commands at a time.

Each command is sent at once, and the answers come in the order of the commands. So the time of a round trip bounds how
long an answer takes, but not how many commands are carried per second. All commands of a line run in the order of the
calls, also those whose caller was cancelled.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

_CONNECT_TIMEOUTS = 2.0
"""Timeouts of a command that connecting may take, because it needs several round trips."""

_CLOSED = "the connection was closed"

_NOT_REDIS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError, RecursionError)
"""What redis-py raises while it reads bytes that are no answer of Redis, besides its own errors."""


@contextmanager
def as_redis_speaks() -> Iterator[None]:
    """Around the reading of answers: what Redis never sends is a lost connection, because no answer after it fits."""
    try:
        yield
    except _NOT_REDIS:
        raise RedisConnectionError("an answer that Redis never gives; is it Redis?") from None


class RedisLine:
    """A connection that is opened with the first command, and again with the first one after it was lost.

    Args:
        new_connection: returns a connection of redis-py, not yet connected.
        timeout_s: a connection on which no answer arrives for that time, although one is due, is lost.
        is_outdated: whether an error means that the server is not the right one any more. A new connection may reach
            another server.
    """

    def __init__(
        self, new_connection: Callable[[], Any], timeout_s: float, is_outdated: Callable[[Exception], bool]
    ) -> None:
        self._new_connection = new_connection
        self._timeout_s = timeout_s
        self._is_outdated = is_outdated
        self._wire: _Wire | None = None

    async def call(self, *command: bytes | str | float) -> Any:
        """Run a command; once more if a connection is lost that was there before. Every command may be repeated.

        Raises:
            RedisError, OSError, TimeoutError: the server refused, or the connection was lost.
        """
        wire = self._wire
        if wire is not None and not wire.is_over:
            try:
                return await self._ask(wire, command)
            except (RedisConnectionError, OSError) as error:
                if self._is_outdated(error):
                    raise
        if self._wire is None or self._wire.is_over:
            self._wire = _Wire(self._new_connection(), self._timeout_s)
        return await self._ask(self._wire, command)

    def is_answering(self) -> bool:
        """Whether an answer has arrived lately, although perhaps not to every call."""
        return self._wire is not None and not self._wire.is_over and self._wire.silent_s() < self._timeout_s

    async def close(self) -> None:
        """Close the connection. The next command opens another one."""
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

    async def _ask(self, wire: _Wire, command: tuple[bytes | str | float, ...]) -> Any:
        try:
            return await wire.send(command)
        except Exception as error:
            if self._is_outdated(error) and self._wire is wire:
                await self.close()
            raise


class _Wire:
    """The life of one connection, in a task of its own: a cancelled caller never leaves half a command or an answer."""

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._to_send: deque[tuple[list[bytes], asyncio.Future[Any]]] = deque()
        self._sent: deque[asyncio.Future[Any]] = deque()
        self._has_work = asyncio.Event()
        self._has_sent = asyncio.Event()
        self._answered_s = -math.inf
        self.is_over = False
        self._task = asyncio.create_task(self._run())

    def silent_s(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._answered_s

    def send(self, command: tuple[bytes | str | float, ...]) -> asyncio.Future[Any]:
        """The answer to a command, or the error."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._to_send.append((self._connection.pack_command(*command), answer))
        self._has_work.set()
        return answer

    async def close(self) -> None:
        """End the task. redis-py may lose a cancellation on Python 3.11, so it may take several."""
        while not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)
        self._end(RedisConnectionError(_CLOSED))  # a task that was cancelled before its first step has not done it

    async def _run(self) -> None:
        error: BaseException = RedisConnectionError(_CLOSED)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUTS * self._timeout_s):
                with as_redis_speaks():
                    await self._connection.connect()
            loops = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
            try:
                done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
                error = done.pop().exception() or error
            finally:
                for loop in loops:
                    loop.cancel()
                await asyncio.gather(*loops, return_exceptions=True)
        except Exception as lost:
            error = lost
        finally:
            self._end(error)
            await self._connection.disconnect(nowait=True)

    async def _write(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            packed: list[bytes] = []
            while self._to_send:
                command, answer = self._to_send.popleft()
                packed += command
                self._sent.append(answer)
            if packed:
                self._has_sent.set()
                await self._connection.send_packed_command(packed, check_health=False)

    async def _read(self) -> None:
        while True:
            if not self._sent:
                self._has_sent.clear()
                await self._has_sent.wait()
            try:
                async with asyncio.timeout(self._timeout_s):
                    with as_redis_speaks():
                        result = await self._connection.read_response(timeout=math.inf, disconnect_on_error=False)
            except ResponseError as error:
                self._answered(error)
            except TimeoutError:
                raise RedisTimeoutError(f"no answer within {self._timeout_s:g} s") from None
            else:
                self._answered(result)

    def _answered(self, result: Any) -> None:
        self._answered_s = time.monotonic()
        answer = self._sent.popleft()
        if answer.done():
            return  # its caller was cancelled
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def _end(self, error: BaseException) -> None:
        """Take no more commands, and fail those without an answer."""
        self.is_over = True
        for answer in (*self._sent, *(answer for _, answer in self._to_send)):
            if not answer.done():
                answer.set_exception(error)
        self._sent.clear()
        self._to_send.clear()
