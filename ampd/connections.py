"""Ends TCP connections of a process that the network has forgotten, whoever opened them: `bound_silence`.

    python -m ampd.connections MODULE ARGUMENTS     # runs a module of somebody else with it

A firewall, a NAT table or a switch may drop all packets of a connection while both processes live. Without a bound the
kernel goes on sending for a quarter of an hour, and each call on the connection waits that long. Dynamo has no option
for it. A process that stands still keeps its connections, because its kernel acknowledges what comes.
"""

from __future__ import annotations

import ctypes
import runpy
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

SILENCE_S = 5
"""A connection whose peer acknowledges nothing for so long is broken."""
_LOOK_S = 1.0
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
)
_LIBC = ctypes.CDLL(None)


def bound_silence() -> None:
    """From now on, for all connections of this process, those that it has not opened yet included."""
    threading.Thread(target=_run, name="bound-silence", daemon=True).start()


def _run() -> None:
    known: set[str] = set()
    stopped = threading.Event()
    while not stopped.wait(_LOOK_S):
        found = set()
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                name = str(entry.readlink())
                if name.startswith("socket:"):
                    found.add(name)
                    if name not in known:
                        _bound(int(entry.name))
        known = found


def _bound(number: int) -> None:
    """Another kind of socket does not know the first option."""
    for level, option, value in _OPTIONS:
        if _LIBC.setsockopt(number, level, option, ctypes.byref(ctypes.c_int(value)), 4):
            return


if __name__ == "__main__":
    bound_silence()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
