"""Child processes that do not outlive their parent."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Runs in the child: ask the kernel for SIGTERM at the end of the parent, see that the parent still runs, then exec.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def tied_to_parent(argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv` and gets SIGTERM when the thread that started it ends, however it ends.

    The process id is that of the program. `argv[0]` is a path.
    """
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *argv]
