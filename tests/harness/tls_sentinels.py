"""A Redis with a replica and three Sentinels, all behind TLS, as their clients see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tests.harness.sentinels import SERVICE, Sentinels
from tests.harness.tcp_redis import TcpRedis
from tests.harness.tls_proxy import Certificate, OptionalTlsProxy, TlsProxy


@asynccontextmanager
async def tls_sentinels(certificate: Certificate) -> AsyncIterator[tuple[Sentinels, str]]:
    """The servers, and the URL with which a client speaks TLS to all of them. Among each other they speak none.

    The bundled Redis has no TLS, so proxies end it. The Sentinels watch, and tell, ports that take both.
    """
    async with AsyncExitStack() as stack:

        async def watched_port(server_port: int) -> int:
            behind_tls = await stack.enter_async_context(TlsProxy(server_port, certificate))
            both = await stack.enter_async_context(OptionalTlsProxy(server_port, behind_tls.port))
            return both.port

        master = TcpRedis()
        replica = TcpRedis()
        replica._arguments += ("--replica-announce-port", str(await watched_port(replica.port)))
        servers = Sentinels(master, await watched_port(master.port), replica)
        await asyncio.to_thread(stack.enter_context, servers)
        proxies = [await stack.enter_async_context(TlsProxy(port, certificate)) for port in servers.ports]
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
        yield servers, f"rediss+sentinel://{hosts}/{SERVICE}/0?ssl_ca_certs={certificate[0]}"
