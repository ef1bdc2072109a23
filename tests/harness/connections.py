"""Resets TCP connections of living processes, or drops their packets, as a network does that has forgotten them."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)
_NO_PEER = struct.pack("H14x", socket.AF_UNSPEC)
_ATTACH_FILTER = 26
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""A filter of one instruction: no packet gets through."""


def reset_accepted(pid: int) -> int:
    """Reset the connections that the listening TCP sockets of a process have accepted; returns how many.

    The process is a descendant of this one, or belongs to root's tests.
    """
    with _sockets(pid) as own:
        listening = {each.getsockname()[1] for each in own if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
        return sum(reset(each) for each in own if _peer(each) and each.getsockname()[1] in listening)


def strike_between(left: Collection[int], right: Collection[int], strike: Callable[[socket.socket], bool]) -> int:
    """Strike both ends of each TCP connection between two groups of processes; returns the number of ends."""
    struck = 0
    ends: list[set[tuple[object, object]]] = []
    for pids in (left, right):
        ends.append(set())
        for pid in pids:
            with _sockets(pid) as own:
                ends[-1] |= {(_own(each), _peer(each)) for each in own if _peer(each)}
    wanted = {end for end in ends[0] if end[::-1] in ends[1]}
    wanted |= {end[::-1] for end in wanted}
    for pid in {*left, *right}:
        with _sockets(pid) as own:
            struck += sum(strike(each) for each in own if _peer(each) and (_own(each), _peer(each)) in wanted)
    return struck


def reset(connection: socket.socket) -> bool:
    """To connect to no address aborts a connection: its peer gets RST."""
    return not _LIBC.connect(connection.fileno(), _NO_PEER, len(_NO_PEER))


def drop_packets(connection: socket.socket) -> bool:
    """Nothing that the peer sends arrives any more, acknowledgements included."""
    connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(_DROP_ALL)))
    return True


@contextmanager
def _sockets(pid: int) -> Iterator[list[socket.socket]]:
    """The TCP sockets of a process, as handles of this one. A process that has ended has none."""
    own: list[socket.socket] = []
    with suppress(ProcessLookupError, FileNotFoundError):
        owner = os.pidfd_open(pid)
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    if str(entry.readlink()).startswith("socket:"):
                        own.append(_duplicate(owner, int(entry.name)))
        finally:
            os.close(owner)
    try:
        families = (socket.AF_INET, socket.AF_INET6)
        yield [each for each in own if each.type == socket.SOCK_STREAM and each.family in families]
    finally:
        for each in own:
            each.close()


def _duplicate(owner: int, number: int) -> socket.socket:
    """The same socket in this process."""
    descriptor = _LIBC.syscall(_PIDFD_GETFD, owner, number, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return socket.socket(fileno=descriptor)


def _own(connection: socket.socket) -> object:
    return _place(connection.getsockname())


def _peer(connection: socket.socket) -> object:
    with suppress(OSError):
        return _place(connection.getpeername())
    return None


def _place(address: tuple[str, int]) -> tuple[str, int]:
    return address[0].removeprefix("::ffff:"), address[1]
