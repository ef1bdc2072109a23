"""What is printed to the standard error output, as the JSON lines that the logs around it are.

Dynamo prints the traceback of every exception that a handler ends with, a refused request included.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable


class StderrLines(io.TextIOBase):
    """Stands in for `sys.stderr`: each whole line becomes a WARNING of the logger `stderr`.

    Args:
        write: gets each record; never prints to `sys.stderr` itself.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, write: Callable[[logging.LogRecord], object], descriptor: int) -> None:
        self._write = write
        self._descriptor = descriptor
        # Lines come in pieces, and not from one thread only.
        self._begun = threading.local()

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """The real output, for those who write there themselves."""
        return self._descriptor

    def write(self, text: str) -> int:
        """Take text; what follows its last line end waits for the rest."""
        *lines, rest = (getattr(self._begun, "text", "") + text).split("\n")
        self._begun.text = rest
        for line in lines:
            self._say(line)
        return len(text)

    def flush(self) -> None:
        """Let out what this thread has begun; in the middle of a line, `write` goes on in another one."""
        rest, self._begun.text = getattr(self._begun, "text", ""), ""
        self._say(rest)

    def _say(self, line: str) -> None:
        if line.strip():
            self._write(logging.LogRecord("stderr", logging.WARNING, "", 0, line, None, None))
