"""Ports for servers that start later, often in another process."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ampd.errors import RunError

HIGHEST_PORT = 32767
"""Dynamo reads the port of a system server as a signed 16-bit number."""
_LOWEST_PORT = 20000
"""The kernel gives away ports from 32768 on."""
_TRIES = 1000


@contextmanager
def reserved_ports(host: str, count: int, advice: str = "end other programs") -> Iterator[tuple[int, ...]]:
    """Distinct free ports that Dynamo can open.

    Within the context no program that looks for a free port finds them. A server that shares addresses (SO_REUSEADDR)
    can listen there, as those of asyncio, Dynamo, Redis and SGLang do.

    Raises:
        RunError: there are not enough; the line ends with `advice`.
    """
    ports: list[int] = []
    with ExitStack() as stack:
        for _ in range(_TRIES):
            if len(ports) == count:
                break
            holder = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            try:
                holder.bind((host, random.randint(_LOWEST_PORT, HIGHEST_PORT)))
            except OSError:
                continue
            # Only now: with it, this would also get a port that is reserved already.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ports.append(holder.getsockname()[1])
        else:
            raise RunError(f"no {count} free ports from {_LOWEST_PORT} to {HIGHEST_PORT} on {host}; {advice}")
        yield tuple(ports)
