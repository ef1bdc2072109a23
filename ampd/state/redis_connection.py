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
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit
from weakref import WeakSet

from redis.asyncio import ConnectionPool, Redis, Sentinel
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    MasterDownError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ampd.errors import UserError, one_line_of
from ampd.state.store import RoundTrips, StateRefusedError, StateSlowError, StateUnavailableError

Value = bytes | str | float
"""Of a command."""

_MOST_CONNECTIONS = 8
"""For commands. Each running command has one; further commands wait."""

_NOT_REDIS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError, RecursionError)
"""What redis-py raises while it reads bytes that are no answer of Redis, besides its own errors."""

_STRANGE = "an answer that Redis never gives; is it Redis?"

_NOT_THE_MASTER = ("READONLY", "MASTERDOWN", "LOADING")
"""Answers of a server that is no master (any more). A new connection to the same address may reach the master."""

_ALWAYS_WRITE = ("publish", "publish_coordinator")
"""Scripts that always write; processes repeat them as heartbeats. Their success proves that the server is a master, and
that it takes writes: a server that pauses them for a failover still answers all reads and each PING."""


class RedisConnection:
    """A client of the Redis that a URL names, and its subscriptions.

    Every operation raises `StateUnavailableError` where Redis does not answer in time, or refuses. Every command may be
    repeated: it is sent once more if a connection is lost.

    Raises:
        UserError: redis-py does not accept the URL.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.round_trips = RoundTrips()
        self.timeout_s = timeout_s
        self.place = without_secrets(url)
        try:
            self._client: Any = redis_client(url, timeout_s)  # redis-py leaves parts of it without types
            self._new_connection()
        except (ValueError, TypeError, RedisError) as error:
            raise UserError(f"state URL {self.place}: {_reason(error)}") from None
        self._free = asyncio.Semaphore(_MOST_CONNECTIONS)
        self._idle: list[Any] = []
        self._answered_s = self._refused_s = float("-inf")
        self._was_demoted = self._takes_no_writes = False
        self._subscriptions: WeakSet[Subscription] = WeakSet()

    async def script(self, name: str, keys: Sequence[str], arguments: Sequence[Value]) -> Any:
        """Run a script in one round trip, or in two if the server does not know it yet."""
        return (await self.scripts(name, [(keys, arguments)]))[0]

    async def scripts(self, name: str, calls: Sequence[tuple[Sequence[str], Sequence[Value]]]) -> list[Any]:
        """Run a script with several keys and arguments in one round trip.

        The answer of a refused call is its error, unless all are refused.
        """
        is_heartbeat = name in _ALWAYS_WRITE
        try:
            async with self._guarded():
                answers = await self._run_scripts(name, calls)
        except StateUnavailableError as error:
            if is_heartbeat:
                self._takes_no_writes = not isinstance(error, StateRefusedError)
                self._end_subscriptions(self._takes_no_writes)
            raise
        if is_heartbeat:
            self._end_subscriptions(self._was_demoted)
            self._was_demoted = self._takes_no_writes = False
        return answers

    def _end_subscriptions(self, is_outdated: bool) -> None:
        for subscription in self._subscriptions if is_outdated else ():
            subscription.is_outdated = True

    async def _run_scripts(self, name: str, calls: Sequence[tuple[Sequence[str], Sequence[Value]]]) -> list[Any]:
        text, digest = _script(name)
        try:
            return await self._ask(name, [("EVALSHA", digest, len(keys), *keys, *values) for keys, values in calls])
        except NoScriptError:
            return await self._ask(name, [("EVAL", text, len(keys), *keys, *values) for keys, values in calls])

    async def command(self, name: str, *arguments: Value) -> Any:
        """Run one plain command."""
        async with self._guarded():
            return (await self._ask(name.lower(), [(name, *arguments)]))[0]

    async def _ask(self, operation: str, commands: Sequence[Sequence[Value]]) -> list[Any]:
        with self.round_trips.trip(operation):
            async with self._free:
                try:
                    answers = await self._exchange(self._idle.pop() if self._idle else self._new_connection(), commands)
                except RedisConnectionError:  # once more: it may have been lost while it was idle
                    await self._close_idle()
                    answers = await self._exchange(self._new_connection(), commands)
        self._answered_s = time.monotonic()
        return answers

    async def _exchange(self, connection: Any, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """Send commands and read their answers, without the pool of redis-py, which takes as long as all the rest."""
        answers: list[Any] = []
        try:
            if not connection.is_connected:
                await connection.connect()
            try:
                await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            except RuntimeError as error:  # uvloop has closed it: the network or the server has reset it
                raise RedisConnectionError(str(error)) from None
            for _ in commands:
                try:
                    answers.append(await connection.read_response())
                except ResponseError as error:
                    answers.append(error)
        except BaseException:
            await connection.disconnect(nowait=True)  # the answers may still come, and are not those of the next ones
            raise
        self._idle.append(connection)
        if answers and all(isinstance(answer, ResponseError) for answer in answers):
            raise answers[0]
        return answers

    async def subscribe(self, channel: str) -> Subscription:
        """Subscribe on a separate connection, which gets every message published after this returns.

        Nothing is published where no write is answered.
        """
        if self._takes_no_writes:
            raise StateUnavailableError(f"shared state {self.place} answers no writes")
        connection = self._new_connection()
        try:
            async with self._guarded():
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
        await self._close_idle()
        pool = self._client.connection_pool
        if isinstance(pool, SentinelConnectionPool):
            for sentinel in pool.sentinel_manager.sentinels:
                await sentinel.aclose()

    async def _close_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect()

    def _new_connection(self) -> Any:
        return self._client.connection_pool.make_connection()

    @asynccontextmanager
    async def _guarded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except (TimeoutError, RedisTimeoutError):
            raise self._timed_out() from None
        except (ResponseError, BusyLoadingError) as error:
            await self._refused(error)
            raise StateRefusedError(f"shared state {self.place}: {_reason(error)}") from None
        except (RedisError, OSError) as error:
            raise StateUnavailableError(f"shared state {self.place}: {_reason(error)}") from None
        except _NOT_REDIS:
            raise StateUnavailableError(f"shared state {self.place}: {_STRANGE}") from None

    def _timed_out(self) -> StateUnavailableError:
        place = f"shared state {self.place}"
        if time.monotonic() - self._answered_s < self.timeout_s and not self._takes_no_writes:
            return StateSlowError(f"{place} needs longer than {self.timeout_s:g} s for an answer")
        return StateUnavailableError(f"{place} did not answer within {self.timeout_s:g} s; is Redis running there?")

    async def _refused(self, error: Exception) -> None:
        self._refused_s = time.monotonic()
        if _is_not_the_master(error):
            self._was_demoted = True
            # They were opened when the server was the master. New ones may reach another server.
            await self._close_idle()


class Subscription:
    """One subscribed connection. It never reconnects by itself, because events in between would be missing.

    Attributes:
        is_outdated: another server is the master by now, or writes are not answered, so that nothing is published;
            reading fails from the next look on.
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
                raise StateUnavailableError(f"shared state {self._place} has moved, or answers no writes")
            match answer:
                case [b"message", _, bytes(payload)]:
                    return payload
                case None if self._pinged:
                    raise StateUnavailableError(f"shared state {self._place} fell silent")
                case None:
                    await self._ping()

    async def _read(self) -> Any:
        try:
            answer = await self._connection.read_response(timeout=self._timeout_s, disconnect_on_error=False)
        except (RedisError, OSError, TimeoutError) as error:
            raise StateUnavailableError(f"shared state {self._place} is lost: {_reason(error)}") from None
        except _NOT_REDIS:
            raise StateUnavailableError(f"shared state {self._place} is lost: {_STRANGE}") from None
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


def redis_client(url: str, timeout_s: float) -> Any:
    """A client of redis-py for the server that a URL names, or for the master that its Sentinels name.

    Its connections have no timeouts of their own but for connecting.

    Args:
        url: as in `ampd.state.redis_store.open_store`.

    Raises:
        ValueError, TypeError, RedisError: redis-py does not accept the URL.
    """
    options = {
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 1, (RedisConnectionError,)),
        "protocol": 2,
    }
    parts = urlsplit(url)
    if parts.scheme in SENTINEL_SCHEMES:
        client = _client_by_sentinels(parts, timeout_s, options)
    else:
        client = Redis(connection_pool=ConnectionPool.from_url(url, **options))
    client.response_callbacks.clear()  # answers as Redis gives them
    return client


def _client_by_sentinels(parts: SplitResult, timeout_s: float, options: dict[str, Any]) -> Any:
    hosts, service = sentinels_of(parts)
    own, theirs = _options(parts)
    # Sentinels are asked one after the other. The last one must have its turn although the others are silent, as they
    # are when their machines are gone. By default redis-py asks a dead one four times, with pauses.
    each_s = timeout_s / len(hosts)
    bounds = {"socket_timeout": each_s, "socket_connect_timeout": each_s, "retry": Retry(NoBackoff(), 0)}
    make: Any = Sentinel  # redis-py leaves it without types
    return make(hosts, sentinel_kwargs=theirs | bounds).master_for(service, **(own | options))


def _options(parts: SplitResult) -> tuple[dict[str, Any], dict[str, Any]]:
    """redis-py's options of the servers and of the Sentinels. Options `sentinel_*` of the URL are the Sentinels'."""
    query = parse_qsl(parts.query)
    theirs = {name.removeprefix("sentinel_"): value for name, value in query if name.startswith("sentinel_")}
    user = parts.netloc.rpartition("@")[0]
    database = parts.path.strip("/").partition("/")[2] or "0"
    others = urlencode([(name, value) for name, value in query if not name.startswith("sentinel_")])
    scheme = parts.scheme.removesuffix("+sentinel")
    own: dict[str, Any] = dict(parse_url(f"{scheme}://{user}{'@' if user else ''}sentinel:0/{database}?{others}"))
    for name in ("host", "port", "connection_class"):
        own.pop(name, None)
    if scheme == "rediss":
        own["ssl"] = True
        theirs = {**{name: value for name, value in own.items() if name.startswith("ssl")}, **theirs}
    return own, theirs


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


# -- URLs of the shared state

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_SENTINEL_PORT = 26379
_USER = "([^/?#]*@)?"
_HOST = r"(\[[^\]/?#@]+\]|[^\[\]:/?#@,]+)(:\d{1,5})?"
_URL = re.compile(
    rf"(rediss?://{_USER}{_HOST}(/\d*/?)?|rediss?\+sentinel://{_USER}{_HOST}(,{_HOST})*/[^/?#]+(/\d*)?|unix://{_USER}/[^?#]+)"
    r"(\?\S*)?",
    re.ASCII,
)
NO_CLUSTER = (
    "state URL: Redis Cluster is not supported; use one Redis, several behind Sentinels (redis+sentinel://), or one "
    "address that follows the master"
)


def check_url(url: str) -> None:
    """Raise `UserError` for a malformed URL. Nothing of it is quoted, because any part may belong to a password."""
    if not _URL.fullmatch(url):
        raise UserError(
            "state URL: it is malformed; give redis://USER:PASSWORD@HOST:6379/0, rediss:// (TLS), unix:///SOCKET or "
            "redis+sentinel://HOST:26379,HOST:26379/SERVICE/0, and write / ? # of a password as %2F %3F %23"
        )


def sentinels_of(parts: SplitResult) -> tuple[list[tuple[str, int]], str]:
    """The Sentinels and the name of the service that they watch, of a URL that was checked."""
    places = [urlsplit(f"//{place}") for place in parts.netloc.rpartition("@")[2].split(",")]
    hosts = [(place.hostname or "", place.port or _SENTINEL_PORT) for place in places]
    return hosts, unquote(parts.path.strip("/").partition("/")[0])
