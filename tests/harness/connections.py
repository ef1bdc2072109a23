"""Resets TCP connections of a living process, as a network does that has forgotten them."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)
_NO_PEER = struct.pack("H14x", socket.AF_UNSPEC)


def reset_accepted(pid: int) -> int:
    """Reset the connections that the listening TCP sockets of a process have accepted; returns how many.

    The process is a descendant of this one, or belongs to root's tests.
    """
    owner = os.pidfd_open(pid)
    try:
        own = [_duplicate(owner, int(entry.name)) for entry in Path(f"/proc/{pid}/fd").iterdir() if _is_socket(entry)]
    finally:
        os.close(owner)
    tcp = [each for each in own if each.type == socket.SOCK_STREAM and each.family in (socket.AF_INET, socket.AF_INET6)]
    listening = {each.getsockname()[1] for each in tcp if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
    resets = sum(_reset(each) for each in tcp if _is_connected(each) and each.getsockname()[1] in listening)
    for each in own:
        each.close()
    return resets


def _is_socket(entry: Path) -> bool:
    with suppress(OSError):  # closed meanwhile
        return str(entry.readlink()).startswith("socket:")
    return False


def _duplicate(owner: int, number: int) -> socket.socket:
    """The same socket in this process."""
    descriptor = _LIBC.syscall(_PIDFD_GETFD, owner, number, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return socket.socket(fileno=descriptor)


def _is_connected(connection: socket.socket) -> bool:
    with suppress(OSError):
        return bool(connection.getpeername())
    return False


def _reset(connection: socket.socket) -> bool:
    """To connect to no address aborts a connection: its peer gets RST."""
    return not _LIBC.connect(connection.fileno(), _NO_PEER, len(_NO_PEER))
