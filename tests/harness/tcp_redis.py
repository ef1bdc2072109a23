"""A private Redis that also listens on a TCP port."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from ampd.child_process import HIGHEST_PORT
from ampd.state.embedded import EmbeddedRedis
from tests.harness.ports import HOST, free_ports

_BUS_DISTANCE = 10_000
"""From the port of a cluster's node to its second one, for other nodes; only Redis 7 can be told another one."""


class TcpRedis(EmbeddedRedis):
    """Listens on a free port of 127.0.0.1 and on its socket; as a cluster's node, on a second port too."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        # Outside of the range from which the kernel gives ports away, so that it is still free when the server starts.
        self._ports = _node_ports() if "--cluster-enabled" in arguments else free_ports(1)
        self.port = self._ports[0]
        self.tcp_url = f"redis://{HOST}:{self.port}/0"
        super().__init__(["--port", str(self.port), "--bind", HOST, *arguments])
        self._reservation = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # Others would take a port while the server is away. It may listen, because it shares addresses as this
            # does.
            for port in self._ports:
                reserved = stack.enter_context(socket.socket())
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                reserved.bind((HOST, port))
            super().__enter__()
            self._reservation = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._reservation.close()


def _node_ports() -> tuple[int, int]:
    """Both ports of a cluster's node, free now and outside of the kernel's range."""
    while True:
        (port,) = free_ports(1)
        bus_port = port + _BUS_DISTANCE
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind((HOST, bus_port))
            if bus_port <= HIGHEST_PORT:
                return port, bus_port
