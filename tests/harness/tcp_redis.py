"""A private Redis that also listens on a TCP port."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ampd.state.embedded import EmbeddedRedis


class TcpRedis(EmbeddedRedis):
    """Listens on a free port of 127.0.0.1 and on its socket."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.tcp_url = f"redis://127.0.0.1:{self.port}/0"
        super().__init__(["--port", str(self.port), "--bind", "127.0.0.1", *arguments])
