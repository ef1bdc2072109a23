"""`ampd top` in a terminal and in a pipe: it refreshes, survives a lost state, and leaves the terminal as it was."""

import asyncio
import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ampd.state import open_store
from ampd.state.embedded import EmbeddedRedis
from ampd.telemetry.coordinator_view import CoordinatorView
from ampd.types import Role, WorkerView
from tests.ampd.cli.top.lab import SLO

ENTER, LEAVE, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        publish(server, "d1")
        yield server


def publish(server: EmbeddedRedis, worker_id: str) -> None:
    async def write() -> None:
        store = await open_store(server.url, "ampd")
        await store.publish_worker(WorkerView(worker_id, Role.DECODE), 60)
        await store.publish_coordinator(CoordinatorView("c1", SLO), 60)
        await store.close()

    asyncio.run(write())


class Terminal:
    """A terminal of 80 x 24 with `ampd top` in it."""

    def __init__(self, redis: EmbeddedRedis) -> None:
        self.ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.ours, (24, 80))
        self.before = termios.tcgetattr(self.theirs)
        self.output = b""
        argv = [sys.executable, "-m", "ampd", "top", "--state-url", redis.url, "--interval-s", "0.1"]
        # the first terminal that a new session opens is the one whose Ctrl-C it hears
        opening = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(self.theirs)]
        self.process = subprocess.Popen([*opening, *argv], start_new_session=True, env=environment())

    def until(self, condition: Callable[[bytes], bool]) -> None:
        """Read what it shows until the condition holds of what came since the last call."""
        fresh = b""
        while not condition(fresh):
            ready, _, _ = select.select([self.ours], [], [], 60)
            assert ready, self.output
            fresh += os.read(self.ours, 65536)
        self.output += fresh

    def ended(self) -> int:
        """Its exit code, once it has ended; all that it showed is in `output` then."""
        code = self.process.wait(60)
        while select.select([self.ours], [], [], 0)[0]:
            self.output += os.read(self.ours, 65536)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


def environment() -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name != "COLUMNS"}, "TERM": "xterm-256color"}


@pytest.fixture
def terminal(redis: EmbeddedRedis) -> Iterator[Terminal]:
    started = Terminal(redis)
    yield started
    started.close()


def last_page(shown: bytes) -> bytes:
    return shown.rpartition(b"ampd top")[2]


@pytest.mark.parametrize("ending", [b"q", b"\x03", signal.SIGINT, signal.SIGTERM])
def test_it_leaves_the_terminal_as_it_was(terminal: Terminal, ending: bytes | signal.Signals) -> None:
    terminal.until(lambda shown: b"decode" in shown and b"q or Ctrl-C" in shown)
    assert ENTER in terminal.output
    if isinstance(ending, bytes):
        os.write(terminal.ours, ending)
    else:
        os.kill(terminal.process.pid, ending)
    assert terminal.ended() == 0
    afterwards = terminal.output.rpartition(ENTER)[2]
    assert LEAVE in afterwards
    assert SHOW_CURSOR in afterwards
    assert termios.tcgetattr(terminal.theirs) == terminal.before
    assert b"Traceback" not in terminal.output


def test_it_shows_what_changes_and_what_is_lost_and_comes_back(terminal: Terminal, redis: EmbeddedRedis) -> None:
    terminal.until(lambda shown: b"d1" in shown)
    publish(redis, "d2")
    terminal.until(lambda shown: b"d2" in shown)
    redis.stop()
    # what was seen last stays, with the reason why it is not fresh
    terminal.until(lambda shown: b"as of" in shown and b"d2" in shown)
    redis.start()
    publish(redis, "d3")
    terminal.until(lambda shown: b"d3" in last_page(shown) and b"as of" not in last_page(shown))
    os.write(terminal.ours, b"q")
    assert terminal.ended() == 0


def test_a_resized_terminal_is_filled_anew(terminal: Terminal) -> None:
    terminal.until(lambda shown: b"decode" in shown)
    termios.tcsetwinsize(terminal.ours, (24, 30))
    os.kill(terminal.process.pid, signal.SIGWINCH)
    terminal.until(lambda shown: b"decode" in last_page(shown) and b"batch" not in last_page(shown))
    os.write(terminal.ours, b"q")
    assert terminal.ended() == 0


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_in_a_pipe_it_prints_once_an_interval(redis: EmbeddedRedis, flags: list[str]) -> None:
    argv = [sys.executable, "-m", "ampd", "top", "--state-url", redis.url, "--interval-s", "0.1", *flags]
    with piped(argv) as process:
        assert process.stdout is not None
        looks = 0
        for line in process.stdout:
            assert "\x1b" not in line
            looks += json.loads(line)["workers"][0]["worker_id"] == "d1" if flags else line.startswith("ampd top")
            if looks == 3:
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 0


@contextlib.contextmanager
def piped(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
