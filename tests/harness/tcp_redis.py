"""A private Redis that also listens on a TCP port."""

from __future__ import annotations

from collections.abc import Sequence

from ampd.cli.serve.metrics import free_ports
from ampd.state.embedded import EmbeddedRedis


class TcpRedis(EmbeddedRedis):
    """Listens on a free port of 127.0.0.1 and on its socket."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        # Outside of the range from which the kernel gives ports away, so that it is still free when the server starts.
        (self.port,) = free_ports("127.0.0.1", 1)
        self.tcp_url = f"redis://127.0.0.1:{self.port}/0"
        super().__init__(["--port", str(self.port), "--bind", "127.0.0.1", *arguments])
