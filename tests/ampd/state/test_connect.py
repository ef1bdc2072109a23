"""Opening shared state: what each URL means, and what is said when it does not work."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import from_url

from ampd.errors import UserError
from ampd.state.redis_connection import without_secrets
from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import SessionLimits, StateUnavailableError
from ampd.types import CoordinatorView, Slo
from tests.harness.sentinels import Sentinels
from tests.harness.tcp_redis import TcpRedis
from tests.harness.tls_proxy import Certificate, TlsProxy, make_certificate, needs_openssl
from tests.harness.tls_sentinels import tls_sentinels
from tests.waiting import PATIENCE_S

open_patiently = partial(open_store, timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:6379", "malformed"),
        ("", "malformed"),
        ("http://localhost", "malformed"),
        ("redis://", "malformed"),
        ("redis://host:notaport", "malformed"),
        ("redis://host:99999", "port"),
        ("redis://host:6379/first", "malformed"),
        ("redis://[::1", "malformed"),
        ("unix://", "malformed"),
        ("redis://host:6379/0?no_such_option=1", "no_such_option"),
        ("rediss://host:6379/0?ssl_cert_reqs=sometimes", "sometimes"),
    ],
)
async def test_a_malformed_url_is_the_users_error(url: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        await open_store(url, "n")
    assert says.lower() in str(caught.value).lower()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("mark", ["/", "#", "?"])
@pytest.mark.parametrize("place", ["redis://{}@host:6379/0", "rediss://{}@[::1]:6379", "unix://{}@/run/redis.sock"])
@pytest.mark.parametrize("user", ["", "ampd"])
async def test_a_password_that_ends_the_url_is_not_quoted(user: str, place: str, mark: str) -> None:
    url = place.format(f"{user}:s3{mark}cret")
    with pytest.raises(UserError, match="as %2F") as caught:
        await open_store(url, "n")
    assert "s3" not in str(caught.value)
    assert "cret" not in str(caught.value)
    assert "s3" not in without_secrets(url)
    assert "cret" not in without_secrets(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://ampd:s3@host:6379/0", "redis://host:6379/0"),
        ("redis://ampd:s@3@host/0?password=x", "redis://host/0"),
        ("redis://host?password=s@3", "redis://..."),
        ("unix://:s3@/run/redis.sock?db=1", "unix:///run/redis.sock"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_only_the_place_is_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


async def test_a_port_where_nobody_listens(unused_tcp_port: int) -> None:
    with pytest.raises(StateUnavailableError) as caught:
        await open_store(f"redis://user:s3cret@127.0.0.1:{unused_tcp_port}/0", "n")
    message = str(caught.value)
    assert f"127.0.0.1:{unused_tcp_port}" in message
    assert len(message.splitlines()) == 1
    assert "s3cret" not in message
    assert "user" not in message


async def test_a_host_that_accepts_and_never_answers() -> None:
    connections = []

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, asyncio.timeout(PATIENCE_S):
        with pytest.raises(StateUnavailableError, match=r"did not answer within 0\.2 s"):
            await open_store(f"redis://127.0.0.1:{port}", "n", timeout_s=0.2)
        (connection,) = connections
        await connection.wait_closed()


async def test_a_socket_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StateUnavailableError, match="nothing\\.sock"):
        await open_store(f"unix://{tmp_path}/nothing.sock", "n")


async def test_something_that_is_not_redis() -> None:
    async def chat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(chat, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(StateUnavailableError) as caught:
            await open_store(f"redis://127.0.0.1:{port}", "n", timeout_s=1)
    assert len(str(caught.value).splitlines()) == 1


async def test_namespaces_share_a_redis_apart(redis_server: TcpRedis, make: Any) -> None:
    store = await open_patiently(redis_server.url, "apart-1")
    other_store = await open_patiently(redis_server.url, "apart-2")
    watcher = other_store.watch()
    await watcher.start()
    await store.publish_worker(make.view("d1"), 60)
    await store.route(make.write(), SessionLimits(60))
    await other_store.end_session("marker")
    assert await other_store.snapshot() == []
    assert await other_store.binding("s1") is None
    assert (await anext(watcher)).session_id == "marker"
    await watcher.aclose()
    await store.close()
    await other_store.close()


async def test_tcp_and_socket_reach_the_same_redis(redis_server: TcpRedis, make: Any) -> None:
    by_port = await open_patiently(redis_server.tcp_url, "n")
    by_socket = await open_patiently(redis_server.url, "n")
    await by_port.publish_worker(make.view("d1"), 60)
    assert await by_socket.snapshot() == [make.view("d1")]
    await by_port.close()
    await by_socket.close()


async def test_every_key_expires(redis_server: TcpRedis, make: Any) -> None:
    store = await open_patiently(redis_server.url, "expiry")
    await store.publish_worker(make.view("d1"), 60)
    binding = (await store.route(make.write(), SessionLimits(60))).binding
    await store.rebind(binding, "d2", 60)
    await store.lead("c1", 60)
    await store.assign_role("c1", make.role(), 60)
    await store.end_session("ended")
    for worker_id in ("d1", "d2"):
        await store.record_death("prompt", worker_id)
    connection = from_url(redis_server.url)
    try:
        keys = [key async for key in connection.scan_iter("ampd:{expiry}:*")]
        kinds = {key.decode().split(":")[2] for key in keys}
        assert kinds == {
            *("workers", "worker", "queue", "session", "live", "leader", "role", "assigned", "ended", "deaths"),
            "refused",
        }
        assert all([await connection.pttl(key) > 0 for key in keys])
    finally:
        await connection.aclose()
        await store.close()


class TestAccessControl:
    """A user that may do what docs/state.md says it needs, and no more."""

    RULES = (
        "ampd on >p@ss resetchannels ~ampd:{n}:* &ampd:{n}:events &ampd:{n}:roles "
        "+@connection +@scripting +@read +@write +publish +subscribe +time"
    )

    WATCHER = "watcher on >w@tch resetchannels ~ampd:{n}:* +@connection +@scripting +@read +time"

    @pytest.fixture
    def server(self) -> Any:
        users = ["--user", *self.RULES.split(), "--user", *self.WATCHER.split()]
        with TcpRedis([*users, "--requirepass", "root"]) as server:
            yield server

    async def test_who_only_looks_on_may_read_and_not_write(self, server: TcpRedis, make: Any) -> None:
        store = await open_patiently(server.tcp_url.replace("redis://", "redis://ampd:p%40ss@"), "n")
        watcher = await open_patiently(server.tcp_url.replace("redis://", "redis://watcher:w%40tch@"), "n")
        coordinator = CoordinatorView("c1", Slo(1.0, 0.1))
        await store.publish_worker(make.view("d1"), 60)
        await store.publish_coordinator(coordinator, 60)
        overview = await watcher.overview()
        assert [heard.view for heard in overview.workers] == [make.view("d1")]
        assert [heard.view for heard in overview.coordinators] == [coordinator]
        with pytest.raises(StateUnavailableError):
            await watcher.publish_coordinator(coordinator, 60)
        await store.remove_coordinator("c1")
        assert (await watcher.overview()).coordinators == []
        for opened in (store, watcher):
            await opened.close()

    async def test_credentials_come_from_the_url(self, server: TcpRedis, make: Any) -> None:
        url = server.tcp_url.replace("redis://", "redis://ampd:p%40ss@")
        store = await open_patiently(url, "n")
        watcher = store.watch()
        await watcher.start()
        await store.publish_worker(make.view("d1", held_tokens={"s1": 3}), 60)
        binding = (await store.route(make.write(), SessionLimits(60))).binding
        await store.finish_tasks("d1", ["t1"])
        await store.rebind(binding, "d2", 60)
        assert await store.binding("s1") is not None
        assert (await store.snapshot())[0].held_tokens == {"s1": 3}
        await store.end_session("s1")
        heard = store.watch_roles()
        await heard.start()
        assert (await store.lead("c1", 60)).leads
        assert await store.assign_role("c1", make.role(), 60)
        assert await anext(heard) == make.role()
        await store.resign("c1")
        await heard.aclose()
        await store.remove_worker("d1")
        for _ in range(5):
            await anext(watcher)
        await watcher.aclose()
        await store.close()

    async def test_another_namespace_is_refused(self, server: TcpRedis, make: Any) -> None:
        store = await open_patiently(server.tcp_url.replace("redis://", "redis://ampd:p%40ss@"), "other")
        with pytest.raises(StateUnavailableError) as caught:
            await store.publish_worker(make.view("d1"), 60)
        assert len(str(caught.value).splitlines()) == 1
        await store.close()

    @pytest.mark.parametrize("credentials", ["", "ampd:s3cret@", "nobody:p%40ss@"])
    async def test_wrong_credentials_are_one_line_without_them(self, server: TcpRedis, credentials: str) -> None:
        with pytest.raises(StateUnavailableError) as caught:
            await open_store(server.tcp_url.replace("redis://", f"redis://{credentials}"), "n")
        assert len(str(caught.value).splitlines()) == 1
        for secret in ("s3cret", "p@ss", "p%40ss"):
            assert secret not in str(caught.value)


@pytest.mark.parametrize("how", ["silent", "ended"])
async def test_a_sentinel_that_is_gone_does_not_hide_the_others(how: str) -> None:
    with ExitStack() as stack:
        gone = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        hosts = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in gone)
        if how == "ended":
            for each in gone:
                each.close()
        servers = stack.enter_context(Sentinels())
        store = await open_store(servers.url.replace("://", f"://{hosts},"), "gone")
        assert await store.snapshot() == []
        await store.close()


async def check_that_it_works(store: StateStore, make: Any) -> None:
    """A store that was opened takes and tells a worker, and is closed."""
    watcher = store.watch()
    await watcher.start()
    await store.publish_worker(make.view("d1"), 60)
    assert await store.snapshot() == [make.view("d1")]
    await anext(watcher)
    await watcher.aclose()
    await store.close()


@needs_openssl
class TestTls:
    """The bundled Redis has no TLS of its own: a proxy that ends TLS stands before it, as it does in many clusters."""

    async def test_a_known_authority_is_trusted(
        self, redis_server: TcpRedis, certificate: Certificate, make: Any
    ) -> None:
        async with TlsProxy(redis_server.port, certificate) as proxy:
            store = await open_patiently(f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={certificate[0]}", "tls")
            await check_that_it_works(store, make)

    async def test_an_unknown_authority_is_refused(self, redis_server: TcpRedis, certificate: Certificate) -> None:
        async with TlsProxy(redis_server.port, certificate) as proxy:
            with pytest.raises(StateUnavailableError, match=r"(?i)certificate"):
                await open_store(f"rediss://127.0.0.1:{proxy.port}/0", "tls")

    async def test_sentinels_and_the_server_that_they_name(self, certificate: Certificate, make: Any) -> None:
        """Real Sentinels and a real Redis; all connections of the client are TLS, with one authority."""
        async with tls_sentinels(certificate) as (_, url):
            store = await open_patiently(url, "tls")
            await check_that_it_works(store, make)
            with pytest.raises(StateUnavailableError, match="do they speak TLS") as refusal:
                await open_store(url.partition("?")[0], "tls")
            assert len(str(refusal.value)) < 300

    @pytest.fixture
    def certificate(self, tmp_path: Path) -> Certificate:
        return make_certificate(tmp_path)
