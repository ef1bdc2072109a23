"""A small supervisor: starts the processes of a graph, watches them, says why one ended, and stops all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from ampd.background_tasks import SupervisedTask
from ampd.child_process import tied_to_parent
from ampd.cli.serve.settings import COORDINATOR, FRONTEND, ServeSettings
from ampd.errors import RunError
from ampd.policies.registry import POOLS

# -- why a process of the graph ended, from its log and its exit code

_TRACEBACK = re.compile(r"(?<!Exception Group )Traceback \(most recent call last\):")
_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL|error:|panicked at)(?!\w)|\b\w+(Error|Exception): ")
_NO_REASON = re.compile(r"\bWARN(ING)?\b|Warning: |\bhttp-request\b|Streaming error: ")
"""In warnings, and in the lines that Dynamo's frontend logs as errors when it has refused a request."""
_OWN_ERROR = "ampd: "
"""How a program of this project begins the line that says why it ends."""
_LAST_LINES = 200
_WATCH_ENDED = "monitor_instance_source: The Sender is dropped"
"""How Dynamo's frontend says that it could not watch discovery by files, when it ends for that reason."""
_NO_WATCH = "it got no inotify instance from the kernel; sysctl -w fs.inotify.max_user_instances=1024"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SHELL_SIGNALS = 128
"""A program that was told of a child's signal ends with this much more than its number."""


def reason_of(log: Path) -> str:
    """What ended a process, from its last lines: its own words, or the first exception, or an error, or the last line.

    Later exceptions are consequences: chained ones, and those of parents that end because a child has ended.
    """
    lines = log_lines(log)[-_LAST_LINES:]
    if any(_WATCH_ENDED in line for line in lines):
        return _NO_WATCH
    if lines and lines[-1].startswith(_OWN_ERROR):
        return lines[-1].removeprefix(_OWN_ERROR)
    return _exception_of(lines) or next(_errors_of(lines), None) or last_line(log)


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
    return (line.strip() for line in lines if _ERROR.search(line) and not _NO_REASON.search(line))


def last_line(log: Path) -> str:
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
    """Start a program in its own process group. It is killed when this process dies for any reason.

    SIGTERM would not end a program that hangs, and nothing else would end it later.
    """
    with output.open("wb") as log:
        return subprocess.Popen(
            tied_to_parent(argv, signal.SIGKILL),
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

    A child is killed when this process dies for any reason. `stop` ends every process group and waits for it.

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

    def ended(self, *, has_served: bool = False) -> dict[str, str]:
        """Name -> one line for each process that has ended by itself, with what its log says.

        The log of one that was killed does not say why, if it has served. An engine that cannot start kills itself.
        """
        lines = {}
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                is_killed = has_served and -code in (signal.SIGKILL, signal.SIGTERM)
                name, reason = child.spec.name, "it had no time to log why" if is_killed else reason_of(child.log)
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


# -- Watches a graph that serves: reports processes that end, ends those that hang, starts the frontend again, and fails
# when nothing serves.

# -- Ends processes of a local graph that hang, as the liveness probes of the manifests do.
#
# A process that was stopped keeps its connections open, so that neither the frontend nor the other coordinators notice.
# Once it has ended, its rounds go on at another one, or the graph ends with an error.

PERIOD_S, TIMEOUT_S, FAILURES = 5.0, 4.0, 6
"""The probe of a pod, see `livenessProbe` in k8s/base/graph.yaml."""


class LivenessProbe:
    """Asks the processes of a graph whether they live.

    Failures are counted, and not the time, because this process may have been stopped together with the others.

    Args:
        urls: name of a process -> its `/live`. An answer of any status is a sign of life.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        period_s: float = PERIOD_S,
        timeout_s: float = TIMEOUT_S,
        failures: int = FAILURES,
    ) -> None:
        self._urls = dict(urls)
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._most_failures = failures
        self._failures: Counter[str] = Counter()

    def task(self, supervisor: Supervisor, progress: Callable[[str], None]) -> SupervisedTask:
        """`end_hanging` as a task that goes on after an error, because nothing else would notice its end."""
        return SupervisedTask("liveness probe", lambda: self.end_hanging(supervisor, progress))

    async def end_hanging(self, supervisor: Supervisor, progress: Callable[[str], None]) -> None:
        """End each process that has not answered for the last `failures` times. Runs until it is cancelled.

        Args:
            progress: gets a line per process.
        """
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        while True:
            await asyncio.sleep(asked_s + self._period_s - loop.time())
            asked_s = loop.time()
            ended = supervisor.ended()
            urls = {name: url for name, url in self._urls.items() if name not in ended}
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False) as client:
                await asyncio.gather(*(self._ask(client, name, url) for name, url in urls.items()))
            for name, url in urls.items():
                if self._failures[name] >= self._most_failures:
                    del self._failures[name]  # its successor starts anew
                    progress(f"{name} hangs: no answer at {url} {self._most_failures} times; it is ended")
                    supervisor.kill(name)

    async def _ask(self, client: httpx.AsyncClient, name: str, url: str) -> None:
        try:
            await client.get(url)
        except (httpx.HTTPError, OSError):
            self._failures[name] += 1
        else:
            del self._failures[name]


# -- watches a graph that serves: reports processes that end, starts the frontend again, and fails when nothing serves

_WATCH_S = 0.5
_PAUSE_S = 1.0
"""Before the frontend starts again."""
MOST_ENDS, _ENDS_WITHIN_S = 5, 300.0
"""A frontend that ends more often within this time is given up."""


class GraphWatch:
    """Follows the processes of a graph from the moment that it is ready.

    Of the processes only the frontend starts again: it holds nothing, and Dynamo ends it with exit code 0 where it gets
    no inotify instance. Rounds of a worker or coordinator that ended go on at the others.

    Args:
        discovery_dir: folder of Dynamo's file discovery.
        progress: gets a line for each process that ends, and when the frontend starts again.
    """

    def __init__(
        self, settings: ServeSettings, supervisor: Supervisor, discovery_dir: Path, progress: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._discovery = _folders(discovery_dir)
        self._discovery_dir = discovery_dir
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._reported: set[str] = set()
        self._frontend_ends_s: list[float] = []
        self._frontend_due_s: float | None = None

    async def until(self, stopped: asyncio.Event) -> None:
        """Return when the event is set.

        Raises:
            RunError: the graph cannot serve any more.
        """
        while not stopped.is_set():
            self._look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _WATCH_S)

    def _look(self) -> None:
        ended = self._supervisor.ended(has_served=True)
        new = sorted(ended.keys() - self._reported)
        for name in new:
            self._progress(ended[name] + (self._frontend_ended() if name == FRONTEND else ""))
        self._reported = set(ended)
        starts_again = self._frontend_due_s is not None
        lost = lost_part(self._settings, ended.keys() - {FRONTEND} if starts_again else ended.keys())
        if lost:
            raise RunError(f"ampd serve: no {lost} is left: {ended[new[-1]]}")
        if gone := self._discovery - _folders(self._discovery_dir):
            raise RunError(
                f"ampd serve: the folder {min(gone)[0]} was deleted. In it the processes of the graph find each "
                "other, and they cannot follow a new one; start the graph again, and keep cleaners of temporary files "
                "away from it"
            )
        if self._frontend_due_s is not None and self._loop.time() >= self._frontend_due_s:
            self._frontend_due_s = None
            self._supervisor.start_again(FRONTEND)
            self._reported.discard(FRONTEND)

    def _frontend_ended(self) -> str:
        """Arrange for the frontend's next start; what happens next, in words."""
        now_s = self._loop.time()
        self._frontend_ends_s = [*(end_s for end_s in self._frontend_ends_s if end_s > now_s - _ENDS_WITHIN_S), now_s]
        if len(self._frontend_ends_s) > MOST_ENDS:
            return (
                f"; it does not start again, because it has ended {len(self._frontend_ends_s)} times soon after a start"
            )
        self._frontend_due_s = now_s + _PAUSE_S
        return f"; it starts again in {_PAUSE_S:g} s"


def _folders(top: Path) -> frozenset[tuple[str, int]]:
    """The folders of discovery that exist, with their numbers: processes watch these, and no new ones of the names."""
    found = set()
    for folder in (top, *top.glob("*/*")):
        with contextlib.suppress(FileNotFoundError):
            found.add((str(folder), folder.stat().st_ino))
    return frozenset(found)


def lost_part(settings: ServeSettings, ended: Collection[str]) -> str | None:
    """The part of the graph that has no process left, although the graph cannot serve without it."""
    counts = Counter(name.split("-")[0] for name in ended)
    if counts[FRONTEND]:
        return FRONTEND
    if counts[COORDINATOR] == settings.coordinators:
        return COORDINATOR
    is_fixed, workers = POOLS.create_named(settings.pools).is_idle, settings.start()
    # Where roles change, any worker may come to own sessions.
    needed = {role for role in workers if role.owns_sessions or not is_fixed}
    if sum(counts[role] for role in needed) < sum(workers[role] for role in needed):
        return None
    return f"{' or '.join(role for role in workers if role in needed)} worker" if is_fixed else "worker"
