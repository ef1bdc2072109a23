"""Connections to one Redis: scripts with a deadline, counted and timed, and each failure as one line.

redis-py must not retry for seconds here, nor subscribe again by itself, because the reader would miss events.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha1
from importlib.resources import files
from typing import Any
from weakref import WeakSet

from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    MasterDownError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from ampd.errors import UserError, one_line_of
from ampd.state.connection_pool import close_pool, connection_pool
from ampd.state.counting import RoundTrips
from ampd.state.redis_line import RedisLine, as_redis_speaks
from ampd.state.store import StateRefusedError, StateSlowError, StateUnavailableError

_READ_SCRIPTS = ("snapshot", "coordinators")
"""Scripts with long answers, which must not delay the answers to writes."""

_NOT_THE_MASTER = ("READONLY", "MASTERDOWN", "LOADING")
"""Answers of a server that is no master (any more). A new connection to the same address may reach the master."""

_ALWAYS_WRITE = ("publish", "publish_coordinator")
"""Scripts that always write; processes repeat them as heartbeats. Their success proves that the server is a master."""


class RedisConnection:
    """Two lines to the Redis that a URL names, one for writes and one for reads, and its subscriptions.

    Every operation raises `StateUnavailableError` where Redis does not answer in time, or refuses.

    Raises:
        UserError: redis-py does not accept the URL.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.round_trips = RoundTrips()
        self.timeout_s = timeout_s
        self.place = without_secrets(url)
        try:
            self._pool = connection_pool(url, timeout_s)
            self._new_connection()
        except (ValueError, TypeError, RedisError) as error:
            raise UserError(f"state URL {self.place}: {_reason(error)}") from None
        self._writes = RedisLine(self._new_connection, timeout_s, _is_not_the_master)
        self._reads = RedisLine(self._new_connection, timeout_s, _is_not_the_master)
        self._refused_s = float("-inf")
        self._was_demoted = False
        self._subscriptions: WeakSet[Subscription] = WeakSet()

    async def script(self, name: str, keys: Sequence[str], arguments: Sequence[bytes | str | float]) -> Any:
        """Run a script in one round trip, or in two if the server does not know it yet."""
        async with self._guarded():
            answer = await self._run_script(name, keys, arguments)
        if self._was_demoted and name in _ALWAYS_WRITE:
            self._was_demoted = False
            for subscription in self._subscriptions:
                subscription.is_outdated = True
        return answer

    async def _run_script(self, name: str, keys: Sequence[str], arguments: Sequence[bytes | str | float]) -> Any:
        text, digest = _script(name)
        line = self._reads if name in _READ_SCRIPTS else self._writes
        with self.round_trips.trip(name):
            try:
                return await line.call("EVALSHA", digest, len(keys), *keys, *arguments)
            except NoScriptError:
                pass
        with self.round_trips.trip(name):
            return await line.call("EVAL", text, len(keys), *keys, *arguments)

    async def command(self, name: str, *arguments: bytes | str | float) -> Any:
        """Run one plain command."""
        async with self._guarded():
            with self.round_trips.trip(name.lower()):
                return await self._writes.call(name, *arguments)

    async def subscribe(self, channel: str) -> Subscription:
        """Subscribe on a separate connection, which gets every message published after this returns."""
        connection = self._new_connection()
        try:
            async with self._guarded():
                with as_redis_speaks():
                    await connection.connect()
                    await connection.send_command("SUBSCRIBE", channel)
                    await connection.read_response()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        subscription = Subscription(connection, self.timeout_s, self.place)
        self._subscriptions.add(subscription)
        return subscription

    def refused_ago_s(self) -> float:
        """Seconds since the server last refused a command; infinite if it never did."""
        return time.monotonic() - self._refused_s

    async def close(self) -> None:
        await self._writes.close()
        await self._reads.close()
        await close_pool(self._pool)

    def _new_connection(self) -> Any:
        return self._pool.make_connection()

    @asynccontextmanager
    async def _guarded(self) -> AsyncIterator[None]:
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        failure: StateUnavailableError | None = None
        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except (TimeoutError, RedisTimeoutError):
            failure = self._timed_out()
        except (ResponseError, BusyLoadingError) as error:
            failure = StateRefusedError(f"shared state {self.place}: {_reason(error)}")
            await self._refused(error)
        except (RedisError, OSError) as error:
            failure = StateUnavailableError(f"shared state {self.place}: {_reason(error)}")
        if task and task.cancelling() > cancelled:
            # redis-py uses `asyncio.wait_for`, which in Python 3.11 forgets a cancellation that comes just when the
            # awaited operation succeeds or fails. The task would then never end.
            raise asyncio.CancelledError
        if failure is not None:
            raise failure

    def _timed_out(self) -> StateUnavailableError:
        place = f"shared state {self.place}"
        if self._writes.is_answering() or self._reads.is_answering():
            return StateSlowError(f"{place} needs longer than {self.timeout_s:g} s for an answer")
        return StateUnavailableError(f"{place} did not answer within {self.timeout_s:g} s; is Redis running there?")

    async def _refused(self, error: Exception) -> None:
        self._refused_s = time.monotonic()
        if _is_not_the_master(error):
            self._was_demoted = True
            # It was opened when the server was the master. The line for writes has renewed itself.
            await self._reads.close()


class Subscription:
    """One subscribed connection. It never reconnects by itself, because events in between would be missing.

    Attributes:
        is_outdated: another server is the master by now; reading fails from the next look on.
    """

    def __init__(self, connection: Any, timeout_s: float, place: str) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._place = place
        self._last_answer_s = time.monotonic()
        self._pinged = False
        self.is_outdated = False

    def silent_s(self) -> float:
        """Seconds since the last answer or message of the server."""
        return time.monotonic() - self._last_answer_s

    async def message(self) -> bytes:
        """The next message. A silent server gets a PING, so that a dead connection is noticed.

        Raises:
            StateUnavailableError: the connection is lost.
        """
        while True:
            answer = await self._read()
            if self.is_outdated:
                raise StateUnavailableError(f"shared state {self._place} has moved to another server")
            match answer:
                case [b"message", _, bytes(payload)]:
                    return payload
                case None if self._pinged:
                    raise StateUnavailableError(f"shared state {self._place} fell silent")
                case None:
                    await self._ping()

    async def _read(self) -> Any:
        try:
            with as_redis_speaks():
                answer = await self._connection.read_response(timeout=self._timeout_s, disconnect_on_error=False)
        except (RedisError, OSError, TimeoutError) as error:
            raise StateUnavailableError(f"shared state {self._place} is lost: {_reason(error)}") from None
        if answer is not None:
            self._last_answer_s = time.monotonic()
            self._pinged = False
        return answer

    async def _ping(self) -> None:
        self._pinged = True
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connection.send_command("PING", check_health=False)
        except (RedisError, OSError, TimeoutError) as error:
            raise StateUnavailableError(f"shared state {self._place} is lost: {_reason(error)}") from None

    async def close(self) -> None:
        await self._connection.disconnect(nowait=True)


def _is_not_the_master(error: Exception) -> bool:
    kinds = (ReadOnlyError, MasterDownError, BusyLoadingError)
    # In an error of a script the server's code is in the middle of the text.
    return isinstance(error, kinds) or any(code in str(error) for code in _NOT_THE_MASTER)


@functools.cache
def _script(name: str) -> tuple[str, str]:
    text = (files("ampd.state") / "scripts" / f"{name}.lua").read_text("utf-8")
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()


def without_secrets(url: str) -> str:
    """A URL that may be shown: the place of the Redis, without user, password and options."""
    scheme, _, rest = url.partition("://")
    place, *options = re.split("[?#]", rest, maxsplit=1)
    if "@" in "".join(options) and "@" not in place:
        return f"{scheme}://..."  # The mark may belong to a password.
    return f"{scheme}://{place.rpartition('@')[2]}"


def _reason(error: Exception) -> str:
    text = one_line_of(error).rstrip(".")
    if isinstance(error, AuthenticationError) and "username-password" in text:
        return "the user or password is wrong"
    if isinstance(error, MasterNotFoundError):
        # redis-py's own text describes each Sentinel's connection in a thousand characters.
        return "no Sentinel names a master of the service; do they watch it, and do they speak TLS as the URL says?"
    return text
