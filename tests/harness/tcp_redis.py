"""A private Redis that also listens on a TCP port."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from ampd.state.embedded import EmbeddedRedis
from tests.harness.ports import free_ports


class TcpRedis(EmbeddedRedis):
    """Listens on a free port of 127.0.0.1 and on its socket."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        # Outside of the range from which the kernel gives ports away, so that it is still free when the server starts.
        (self.port,) = free_ports(1)
        self.tcp_url = f"redis://127.0.0.1:{self.port}/0"
        super().__init__(["--port", str(self.port), "--bind", "127.0.0.1", *arguments])
        self._reservation = ExitStack()

    def __enter__(self) -> Self:
        # Others would take the port while the server is away. It may listen, because it shares addresses as this does.
        reserved = self._reservation.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", self.port))
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._reservation.close()
