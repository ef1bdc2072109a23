"""Ports of 127.0.0.1 for the servers of a test."""

from ampd.child_process import reserved_ports

HOST = "127.0.0.1"


def free_ports(count: int) -> tuple[int, ...]:
    """Distinct ports that are free now; others may take them. `reserved_ports` keeps them."""
    with reserved_ports(HOST, count) as ports:
        return ports
