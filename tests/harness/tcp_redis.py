"""A private Redis that also listens on a TCP port."""

from __future__ import annotations

from collections.abc import Sequence

from ampd.cli.serve.metrics import free_ports
from ampd.state.embedded import EmbeddedRedis


class TcpRedis(EmbeddedRedis):
    """Listens on a free port of 127.0.0.1 and on its socket."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        # Of those that the kernel gives to nobody, so that nobody takes it before the server does.
        (self.port,) = free_ports("127.0.0.1", 1)
        self.tcp_url = f"redis://127.0.0.1:{self.port}/0"
        super().__init__(["--port", str(self.port), "--bind", "127.0.0.1", *arguments])
