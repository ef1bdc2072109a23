"""The store by which the ranks of an engine meet, on loopback: by itself torch listens on all addresses."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from ampd.call_signatures import is_loopback_address


def on_loopback(
    original: Any, hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
) -> Any:
    """Make torch's store as `original` (`torch.distributed.rendezvous._create_c10d_store`) does.

    Where the ranks meet at a loopback address, the store of the first rank listens there and nowhere else.
    """
    if rank or not is_loopback_address(hostname):
        return original(hostname, port, rank, world_size, timeout, use_libuv)
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    listener = socket.create_server((hostname, port), family=family)
    return TCPStore(
        host_name=hostname,
        port=listener.getsockname()[1],
        world_size=world_size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        use_libuv=use_libuv,
        master_listen_fd=listener.detach(),
    )
