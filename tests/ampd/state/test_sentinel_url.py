"""URLs of Sentinels."""

from urllib.parse import urlsplit

import pytest

from ampd.errors import UserError
from ampd.state.redis_connection import redis_client, sentinels_of
from ampd.state.redis_store import open_store


@pytest.mark.parametrize(
    ("url", "hosts", "service"),
    [
        ("redis+sentinel://a:1,b:2/s", [("a", 1), ("b", 2)], "s"),
        ("redis+sentinel://u:p%40w@a,b:2/my%2Fservice/3", [("a", 26379), ("b", 2)], "my/service"),
        ("rediss+sentinel://[::1]:7,[::2]/s/0?ssl_cert_reqs=none", [("::1", 7), ("::2", 26379)], "s"),
    ],
)
def test_hosts_and_service_are_read(url: str, hosts: list[tuple[str, int]], service: str) -> None:
    assert sentinels_of(urlsplit(url)) == (hosts, service)
    pool = redis_client(url, 1.0).connection_pool
    assert [(each.connection_pool.connection_kwargs["host"], each.connection_pool.connection_kwargs["port"])
            for each in pool.sentinel_manager.sentinels] == hosts  # fmt: skip
    assert pool.service_name == service
    assert pool.make_connection() is not None


def test_credentials_are_the_servers_and_sentinels_have_their_own() -> None:
    url = "redis+sentinel://u:p%40w@a:1/s/3?sentinel_password=x&client_name=y"
    pool = redis_client(url, 1.0).connection_pool
    own = pool.connection_kwargs
    assert (own["username"], own["password"], own["db"], own["client_name"]) == ("u", "p@w", 3, "y")
    theirs = pool.sentinel_manager.sentinels[0].connection_pool.connection_kwargs
    assert (theirs.get("username"), theirs["password"]) == (None, "x")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis+sentinel://a:1,b:2", "name the service"),
        ("redis+sentinel://a:1,b:2/", "name the service"),
        ("redis+sentinel:///s", "host:port"),
        ("redis+sentinel://a:1,,b/s", "host:port"),
        ("redis+sentinel://a:99999/s", "host:port"),
        ("redis+sentinel://a:x/s", "host:port"),
        (f"redis+sentinel://a:{'9' * 5000}/s", "host:port"),
        ("redis+sentinel://a:1/s/x", "database must be a number"),
        ("redis+cluster://a:1", "Redis Cluster is not supported"),
    ],
)
async def test_a_malformed_one_is_one_line_without_secrets(url: str, text: str) -> None:
    with pytest.raises(UserError, match=text) as error:
        await open_store(url.replace("://", "://user:secret@"), "x")
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)
