"""Where connections to the shared state come from: the server that a URL names, or the master that Sentinels name."""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from redis.asyncio import ConnectionPool, Sentinel
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ampd.state.sentinel_url import SENTINEL_SCHEMES, sentinels_of


def connection_pool(url: str, timeout_s: float) -> Any:
    """A pool of redis-py that only makes connections; they have no timeouts of their own but for connecting.

    Args:
        url: as in `ampd.state.connect.open_store`.

    Raises:
        UserError: the URL of Sentinels is malformed.
        ValueError, TypeError, RedisError: redis-py does not accept the URL.
    """
    options = {
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    parts = urlsplit(url)
    if parts.scheme not in SENTINEL_SCHEMES:
        return ConnectionPool.from_url(url, **options)
    hosts, service = sentinels_of(parts)
    own, theirs = _options(parts)
    # Sentinels are asked one after the other. The last one must have its turn although the others are silent, as they
    # are when their machines are gone. By default redis-py asks a dead one four times, with pauses.
    each_s = timeout_s / len(hosts)
    bounds = {"socket_timeout": each_s, "socket_connect_timeout": each_s, "retry": Retry(NoBackoff(), 0)}
    make: Any = Sentinel  # redis-py leaves it without types
    sentinel = make(hosts, sentinel_kwargs=theirs | bounds)
    # The pool keeps no reference to its client, which is not needed.
    return sentinel.master_for(service, **(own | options)).connection_pool


async def close_pool(pool: Any) -> None:
    """Close what the pool keeps open itself: its connections to Sentinels."""
    if (manager := getattr(pool, "sentinel_manager", None)) is not None:
        for sentinel in manager.sentinels:
            await sentinel.aclose()


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
