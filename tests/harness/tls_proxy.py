"""TLS before servers that have none, as the bundled Redis. Many clusters have such a proxy, too."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path
from shutil import which

import pytest

from tests.harness.tcp_proxy import TcpProxy

Certificate = tuple[Path, Path]
"""Files of a certificate and of its key."""

needs_openssl = pytest.mark.skipif(which("openssl") is None, reason="needs openssl to make a certificate")

_TLS_BEGINS = b"\x16"


def make_certificate(folder: Path) -> Certificate:
    """A certificate of 127.0.0.1, which is its own authority. It needs `openssl`."""
    public, secret = folder / "cert.pem", folder / "key.pem"
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        ["openssl", *options.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", secret, "-out", public],
        check=True,
        capture_output=True,
    )
    return public, secret


class TlsProxy(TcpProxy):
    """Speaks TLS with clients, and passes everything on."""

    def __init__(self, target_port: int, certificate: Certificate) -> None:
        super().__init__(target_port)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*certificate)

    async def __aenter__(self) -> TlsProxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._context)
        return self


class OptionalTlsProxy(TcpProxy):
    """One port for both: connections that begin with TLS lead to `tls_port`, all others to `target_port`.

    Sentinels that speak no TLS tell clients that do the port that they watch themselves.
    """

    def __init__(self, target_port: int, tls_port: int) -> None:
        super().__init__(target_port)
        self._tls_port = tls_port

    async def _lead(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        first = await reader.read(1)
        return (self._tls_port if first == _TLS_BEGINS else self.target_port), first
