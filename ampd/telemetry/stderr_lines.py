"""Turns text that is printed to stderr into JSON log lines, like the logs around it.

Dynamo prints a traceback for every exception that leaves a handler, also for a refused request.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable


class StderrLines(io.TextIOBase):
    """Replaces `sys.stderr`: each whole line becomes a WARNING of the logger `stderr`.

    Args:
        write: gets each record. It must not print to `sys.stderr` itself.
        descriptor: the real stderr, for code that writes to `fileno()`.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, write: Callable[[logging.LogRecord], object], descriptor: int) -> None:
        self._write = write
        self._descriptor = descriptor
        # Lines arrive in pieces, from several threads.
        self._partial = threading.local()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        """Log the whole lines of the text. The remainder waits for the next call of this thread."""
        *lines, rest = (getattr(self._partial, "text", "") + text).split("\n")
        self._partial.text = rest
        for line in lines:
            self._log(line)
        return len(text)

    def flush(self) -> None:
        """Log this thread's unfinished line. Text that follows becomes another line."""
        rest, self._partial.text = getattr(self._partial, "text", ""), ""
        self._log(rest)

    def _log(self, line: str) -> None:
        if line.strip():
            self._write(logging.LogRecord("stderr", logging.WARNING, "", 0, line, None, None))
