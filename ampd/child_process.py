"""Processes: children that do not outlive their parent, the end after Dynamo, ports for servers that start later."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from ampd.errors import RunError

_PR_SET_PDEATHSIG = 1

# Runs in the child: ask the kernel for the signal at the end of the parent, see that the parent still runs, then exec.
_TIED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[3], sys.argv[3:])
"""


def tied_to_parent(argv: Sequence[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """The command line that runs `argv` and gets a signal when the thread that started it ends, however it ends.

    The process id is that of the program. `argv[0]` is a path.
    """
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(int(number)), *argv]


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """In a child: ask the kernel for a signal to this process at the end of the thread that forked it.

    `parent`: its process id, because it may have ended before.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent not in (None, os.getppid()):
        os.kill(os.getpid(), number)


# -- The end of a process that has run Dynamo


def exit_now(code: int) -> NoReturn:
    """End the process after its output is written. Everything else must be released already.

    The interpreter's teardown is left out, because Dynamo's runtime threads may outlive it and crash in it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_within(limit_s: float) -> None:
    """End the process after this time, unless it has ended by then.

    No probe asks a process that serves nothing any more, and it could wait for ever for a child that a driver holds.
    """
    end = threading.Timer(limit_s, os._exit, (1,))
    end.daemon = True
    end.start()


# -- Ports for servers that start later, often in another process

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
