"""Opens the shared state that a URL names."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

from ampd.errors import UserError
from ampd.state.redis_connection import SENTINEL_SCHEMES, sentinels_of
from ampd.state.store import StateStore

DEFAULT_TIMEOUT_S = 2.0

_NO_CLUSTER = (
    "state URL: Redis Cluster is not supported; use one Redis, several behind Sentinels (redis+sentinel://), or one "
    "address that follows the master"
)
_HOST = re.compile(r"([^:\[\]]*|\[.*\])(:\d*)?")


async def open_store(
    url: str, namespace: str, *, clock: Callable[[], float] = time.monotonic, timeout_s: float = DEFAULT_TIMEOUT_S
) -> StateStore:
    """Open the shared state and check that it answers.

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://` (TLS; `?ssl_ca_certs=FILE` and the like)
            or `unix://[user:password@]/path[?db=N]`, or `redis+sentinel://[user:password@]host:port,.../SERVICE[/db]`
            (`rediss+sentinel://` with TLS).
        namespace: separates the graphs that share a Redis.
        clock: the clock of the tasks' arrival times.
        timeout_s: for connecting and for each operation.

    Raises:
        UserError: the URL is malformed, or leads to a server of a kind that is not supported.
        StateUnavailableError: the store does not answer, or refuses.
    """
    check_url(url)
    from ampd.state.redis_store import RedisStore  # a slow import that planning does not need

    store = RedisStore(url, namespace, clock=clock, timeout_s=timeout_s)
    try:
        _check_mode(await store.server_mode())
    except BaseException:
        await store.close()
        raise
    return store


def check_url(url: str) -> None:
    """Raise `UserError` for a malformed URL. Only its scheme is quoted: other parts may belong to a password."""
    if _has_unquoted_credentials(url):
        raise UserError(
            "state URL: the user or the password has a character that ends it in a URL; write / as %2F, ? as %3F, "
            "# as %23"
        )
    try:
        parts = urlsplit(url)
    except ValueError:
        raise UserError("state URL: it is malformed, perhaps its IPv6 address; expected redis://host:port/db") from None
    if parts.scheme in SENTINEL_SCHEMES:
        sentinels_of(parts)
        return
    if "cluster" in parts.scheme:
        raise UserError(_NO_CLUSTER)
    try:
        _ = parts.port
    except ValueError:
        raise UserError("state URL: the port must be a number up to 65535, as in redis://host:6379/0") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise UserError(
            f"state URL: scheme {parts.scheme!r} is not known; expected redis://, rediss://, unix:// or redis+sentinel://"
        )
    if parts.scheme == "unix" and not parts.path.strip("/"):
        raise UserError("state URL: unix:// needs the path of a socket, as in unix:///run/redis/redis.sock")
    if parts.scheme in ("redis", "rediss"):
        _check_redis(parts)


def _check_mode(mode: str) -> None:
    """Refuse a server that is no single Redis."""
    if mode == "cluster":
        raise UserError(_NO_CLUSTER)
    if mode == "sentinel":
        raise UserError(
            "state URL: a Sentinel listens there; name it as redis+sentinel://host:port,.../SERVICE, with the service "
            "that it watches"
        )


def _has_unquoted_credentials(url: str) -> bool:
    """Whether a `/`, `?` or `#` cuts user and password off from the @ that ends them."""
    rest = url.partition("://")[2]
    place = re.split(r"[/?#]", rest, maxsplit=1)[0]
    return "@" in rest and "@" not in place and not _HOST.fullmatch(place)


def _check_redis(parts: SplitResult) -> None:
    if not parts.hostname:
        raise UserError(f"state URL: {parts.scheme}:// needs a host, as in {parts.scheme}://127.0.0.1:6379/0")
    database = parts.path.strip("/")
    if database and not (database.isascii() and database.isdigit()):
        raise UserError(f"state URL: the database must be a number, as in {parts.scheme}://host:6379/0")
