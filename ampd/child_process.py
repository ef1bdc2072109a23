"""Child processes that do not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

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


def end_with_parent(number: signal.Signals) -> None:
    """In a child: ask the kernel for a signal to this process at the end of the thread that forked it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
