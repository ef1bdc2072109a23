"""URLs of Sentinels."""

from urllib.parse import urlsplit

import pytest

from ampd.errors import UserError
from ampd.state.redis_connection import check_url, redis_client, sentinels_of
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
    "url",
    [
        "redis+sentinel://a:1,b:2",
        "redis+sentinel://a:1,b:2/",
        "redis+sentinel:///s",
        "redis+sentinel://a:1,,b/s",
        "redis+sentinel://a:99999/s",
        f"redis+sentinel://a:{'9' * 5000}/s",
        "redis+sentinel://a:1/s/x",
        "redis+cluster://a:1",
        "redis://a:x",
        "redis://a:99999",
        "redis://",
        "redis://a/x",
        "redis://[::1/0",
        "redis://sec/ret@a:1/0",
        "redis://sec#ret@a:1/0",
        "unix://a",
        "http://a",
        "a:6379",
    ],
)
async def test_a_malformed_one_is_one_line_without_secrets(url: str) -> None:
    with pytest.raises(UserError, match="state URL") as error:
        await open_store(url.replace("://", "://user:secret@"), "x")
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://a",
        "rediss://u:p@w%2F@a:1/3?ssl_ca_certs=/x",
        "redis://[::1]:6379/0/",
        "unix:///run/redis.sock?db=2",
        "unix://u:p@/run/redis.sock",
    ],
)
def test_others_are_taken(url: str) -> None:
    check_url(url)
