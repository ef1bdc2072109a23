"""Why a process of the graph ended, from its log and its exit code."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Explain = Callable[[Path, int], str]
"""What ended a process, in a few words: its log, its exit code."""

_TRACEBACK = re.compile(r"(?<!Exception Group )Traceback \(most recent call last\):")
_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL|error:|panicked at)(?!\w)|\b\w+(Error|Exception): ")
_WARNING = re.compile(r"\bWARN(ING)?\b|Warning: ")
_OWN_ERROR = "ampd: "
"""How a program of this project begins the line that says why it ends."""
_LAST_LINES = 50
_OF_A_REQUEST = re.compile(r"\bhttp-request\b|Streaming error: ")
"""In the lines that Dynamo's frontend logs as errors when it has refused a request."""
_WATCH_ENDED = "monitor_instance_source: The Sender is dropped"
"""How Dynamo's frontend says that it could not watch discovery by files, when it ends for that reason."""
_NO_WATCH = (
    "it got no inotify instance, because other programs of this user have them; "
    "sysctl -w fs.inotify.max_user_instances=1024"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NO_ERROR = "no error in its last lines"
_SHELL_SIGNALS = 128
"""A program that was told of a child's signal ends with this much more than its number."""


def first_error(log: Path, _code: int) -> str:
    """What ended a process that did not start: its first exception, else its first error message, else its last line.

    Later lines are consequences: chained exceptions, and parents that end because a child has ended.
    """
    lines = log_lines(log)
    return _exception_of(lines) or next(_errors_of(lines), None) or last_line(log)


def late_error(log: Path, code: int) -> str:
    """What ended a process that had served, or was started again: an exception or the last error in its last lines.

    Errors before it are those of requests, which a process survives. One that was killed has not logged why. One that
    ended because its child was killed has.
    """
    if -code in (signal.SIGKILL, signal.SIGTERM):
        return "it had no time to log why"
    lines = log_lines(log)[-_LAST_LINES:]
    if any(_WATCH_ENDED in line for line in lines):
        return _NO_WATCH
    if lines and lines[-1].startswith(_OWN_ERROR):
        return lines[-1].removeprefix(_OWN_ERROR)
    errors = [line for line in _errors_of(lines) if not _OF_A_REQUEST.search(line)]
    return _exception_of(lines) or (errors[-1] if errors else _NO_ERROR)


def _exception_of(lines: Sequence[str]) -> str | None:
    """The exception of the first traceback."""
    for number, line in enumerate(lines):
        if _TRACEBACK.search(line):
            margin = re.match(r"[\s|]*", line)  # of an exception in a group
            assert margin is not None
            after = (each.removeprefix(margin[0]) for each in lines[number + 1 :])
            if exception := next((each for each in after if not each.startswith((" ", "\t"))), None):
                return exception
    return None


def _errors_of(lines: Sequence[str]) -> Iterator[str]:
    return (line.strip() for line in lines if _ERROR.search(line) and not _WARNING.search(line))


def last_line(log: Path, _code: int = 0) -> str:
    """The last line with text in it of a log file, for error messages."""
    lines = log_lines(log)
    return lines[-1].strip() if lines else "no output"


def log_lines(log: Path) -> list[str]:
    """The lines of a log with text in them, without colours."""
    return [line for line in _COLOUR.sub("", log.read_text(errors="replace")).splitlines() if line.strip()]


def signal_of(code: int) -> str:
    """The signal behind an exit code, in words; empty if there is none."""
    number = _signal_number(code)
    if number is None:
        return ""
    hint = ", as the kernel does when memory is short" if number == signal.SIGKILL else ""
    return f" ({signal.strsignal(number) or 'a signal'}{hint})"


def _signal_number(code: int) -> int | None:
    number = -code if code < 0 else code - _SHELL_SIGNALS
    return number if number in signal.valid_signals() else None
