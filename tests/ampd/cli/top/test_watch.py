"""`ampd top` in a terminal and in a pipe: it refreshes, survives a lost state, and leaves the terminal as it was."""

import asyncio
import json
import os
import pty
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import open_store
from ampd.types import CoordinatorView, Role, WorkerView
from tests.ampd.cli.top.lab import SLO
from tests.harness.fork_server import ForkedProcess, ForkServer
from tests.waiting import PATIENCE_S

ENTER, LEAVE, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


@dataclass
class Site:
    """A graph's shared state with the worker `d1` and a coordinator, and how to start processes that look at it."""

    redis: EmbeddedRedis
    server: ForkServer
    namespace: str = field(default_factory=lambda: uuid4().hex)

    def __post_init__(self) -> None:
        publish(self, "d1")

    def start(self, output: str, *flags: str) -> ForkedProcess:
        shared = ["--state-url", self.redis.url, "--namespace", self.namespace, "--interval-s", "0.1"]
        return self.server.start([sys.executable, "-m", "ampd", "top", *shared, *flags], environment(), Path(output))


@pytest.fixture
def site(redis_server: EmbeddedRedis, fork_server: ForkServer) -> Site:
    return Site(redis_server, fork_server)


def publish(site: Site, worker_id: str) -> None:
    async def write() -> None:
        store = await open_store(site.redis.url, site.namespace, timeout_s=PATIENCE_S)
        await store.publish_worker(WorkerView(worker_id, Role.DECODE), 60)
        await store.publish_coordinator(CoordinatorView("c1", SLO), 60)
        await store.close()

    asyncio.run(write())


class Terminal:
    """A terminal of 80 x 24 with `ampd top` in it."""

    def __init__(self, site: Site) -> None:
        self.ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.ours, (24, 80))
        self.before = termios.tcgetattr(self.theirs)
        self.output = b""
        self.process = site.start(os.ttyname(self.theirs))

    def until(self, condition: Callable[[bytes], bool]) -> None:
        """Read what it shows until the condition holds of what came since the last call."""
        fresh = b""
        while not condition(fresh):
            ready, _, _ = select.select([self.ours], [], [], PATIENCE_S)
            assert ready, self.output
            fresh += os.read(self.ours, 65536)
        self.output += fresh

    def ended(self) -> int:
        """Its exit code, once it has ended; all that it showed is in `output` then."""
        code = self.process.wait(PATIENCE_S)
        while select.select([self.ours], [], [], 0)[0]:
            self.output += os.read(self.ours, 65536)
        return code

    def close(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        os.close(self.ours)
        os.close(self.theirs)


def environment() -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name != "COLUMNS"}, "TERM": "xterm-256color"}


@pytest.fixture
def terminal(site: Site) -> Iterator[Terminal]:
    with closing(Terminal(site)) as started:
        yield started


def last_page(shown: bytes) -> bytes:
    return shown.rpartition(b"ampd top")[2]


@pytest.mark.slow
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


def test_it_shows_what_changes_and_what_is_lost_and_comes_back(fork_server: ForkServer) -> None:
    with EmbeddedRedis() as redis:
        site = Site(redis, fork_server)
        with closing(Terminal(site)) as terminal:
            terminal.until(lambda shown: b"d1" in shown)
            publish(site, "d2")
            terminal.until(lambda shown: b"d2" in shown)
            redis.stop()
            # what was seen last stays, with the reason why it is not fresh
            terminal.until(lambda shown: b"as of" in shown and b"d2" in shown)
            redis.start()
            publish(site, "d3")
            terminal.until(lambda shown: b"d3" in last_page(shown) and b"as of" not in last_page(shown))
            os.write(terminal.ours, b"q")
            assert terminal.ended() == 0


def test_a_resized_terminal_is_filled_anew(terminal: Terminal) -> None:
    terminal.until(lambda shown: b"decode" in shown)
    termios.tcsetwinsize(terminal.ours, (24, 30))
    os.kill(terminal.process.pid, signal.SIGWINCH)
    terminal.until(lambda shown: b"d1" in last_page(shown) and b"batch" not in last_page(shown))
    os.write(terminal.ours, b"q")
    assert terminal.ended() == 0


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_in_a_pipe_it_prints_once_an_interval(site: Site, flags: list[str]) -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours) as output:
        process = site.start(f"/proc/self/fd/{theirs}", *flags)
        os.close(theirs)
        looks = 0
        for line in output:
            assert "\x1b" not in line
            looks += json.loads(line)["workers"][0]["worker_id"] == "d1" if flags else line.startswith("ampd top")
            if looks == 3:
                break
        process.send_signal(signal.SIGINT)
        output.read()
        assert process.wait(PATIENCE_S) == 0
