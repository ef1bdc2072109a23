"""A small supervisor: starts the processes of a graph, says why one ended, and stops all of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ampd.child_process import tied_to_parent

# -- why a process of the graph ended, from its log and its exit code

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


# -- a small supervisor: starts the graph's processes, reports those that end, and stops all of them


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the graph.

    Attributes:
        name: in logs.
        env: environment variables beside those of this process.
        hides: beginning of the names of variables that the process does not inherit, because their values are secret.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    hides: str | None = None

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the process."""
        kept = {name: value for name, value in inherited.items() if not (self.hides and name.startswith(self.hides))}
        return {**kept, **self.env}


class StartedProcess(Protocol):
    """A process that was started, as `subprocess.Popen` is one. It leads its process group."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


Start = Callable[[Sequence[str], Mapping[str, str], Path], StartedProcess]
"""Starts a process: its command line, its whole environment, the file for its output."""


def start_program(argv: Sequence[str], environment: Mapping[str, str], output: Path) -> StartedProcess:
    """Start a program in its own process group. It gets SIGTERM when this process dies for any reason."""
    with output.open("wb") as log:
        return subprocess.Popen(
            tied_to_parent(argv),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    process: StartedProcess
    log: Path


class Supervisor:
    """Runs processes, each in its own process group and with its own log file.

    A child gets SIGTERM when this process dies for any reason. `stop` ends every process group and waits for it.

    Args:
        start: how processes are started.
    """

    def __init__(self, log_dir: Path, start: Start = start_program) -> None:
        self._log_dir = log_dir
        self._start = start
        self._children: list[_Child] = []

    def start(self, spec: ProcessSpec) -> None:
        """Start one process; its output goes to `<log_dir>/<name>.log`."""
        self._children.append(self._started(spec, self._log_dir / f"{spec.name}.log"))

    def start_again(self, name: str) -> None:
        """Start a process that has ended by itself. Its output goes to `<name>.2.log`, that of the next one to 3."""
        (index,) = (index for index, child in enumerate(self._children) if child.spec.name == name)
        ended = self._children[index]
        _signal_group(ended.process, signal.SIGKILL)  # what it has left behind
        number = next(count for count in itertools.count(2) if not (self._log_dir / f"{name}.{count}.log").exists())
        self._children[index] = self._started(ended.spec, self._log_dir / f"{name}.{number}.log")

    def _started(self, spec: ProcessSpec, log: Path) -> _Child:
        return _Child(spec, self._start(spec.argv, spec.environment(os.environ), log), log)

    @property
    def pids(self) -> dict[str, int]:
        """Name -> process id of each process that was started."""
        return {child.spec.name: child.process.pid for child in self._children}

    def ended(self, explain: Explain = last_line) -> dict[str, str]:
        """Name -> one line for each process that has ended by itself, with what `explain` finds in its log."""
        lines = {}
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                name, reason = child.spec.name, explain(child.log, code)
                lines[name] = f"{name} ended with exit code {code}{signal_of(code)}: {reason} (log: {child.log})"
        return lines

    def stop(self, grace_s: float = 10.0, wanted: Callable[[str], bool] = lambda _: True) -> None:
        """Send SIGTERM to every process, newest first, and kill the remaining ones after `grace_s` seconds.

        Args:
            wanted: by its name, whether a process is stopped.
        """
        chosen = [child for child in self._children if wanted(child.spec.name)]
        for child in reversed(chosen):
            _signal_group(child.process, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for child in chosen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(child.process, signal.SIGKILL)
            child.process.wait()
            self._children.remove(child)

    def kill(self, name: str | None = None) -> None:
        """End a process at once, or all of them. A `stop` that waits for them in another thread returns."""
        for child in list(self._children):
            if name in (None, child.spec.name):
                _signal_group(child.process, signal.SIGKILL)


def python_module(module: str, flags: Sequence[str]) -> tuple[str, ...]:
    """The command line `python -m module flags...` with this interpreter."""
    return (sys.executable, "-m", module, *flags)


def _signal_group(process: StartedProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
