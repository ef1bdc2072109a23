"""`ampd top` as it runs: a screen that refreshes in a terminal, lines everywhere else; q, Ctrl-C or SIGTERM ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from ampd.cli.top.render import as_text, screen
from ampd.cli.top.snapshot import Snapshot
from ampd.state.store import StateUnavailableError

Read = Callable[[], Awaitable[Snapshot]]

QUIT_KEYS = frozenset("qQ\x03\x04")
_HINT = "q or Ctrl-C ends"
_PLAIN_WIDTH = 100


@contextlib.contextmanager
def stopping_signals() -> Iterator[asyncio.Event]:
    """An event that is set by SIGINT and SIGTERM while the block runs."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def print_each(read: Read, interval_s: float, stopped: asyncio.Event, *, as_json: bool) -> None:
    """Print one look after another on stdout; a look that fails is a line on stderr."""
    while not stopped.is_set():
        try:
            snapshot = await read()
        except StateUnavailableError as error:
            print(f"ampd top: {error}", file=sys.stderr, flush=True)
        else:
            text = json.dumps(snapshot.as_dict()) if as_json else as_text(snapshot, plain_width())
            print(text, flush=True)
        await _pause(stopped, interval_s)


async def show_each(read: Read, interval_s: float, stopped: asyncio.Event, console: Console | None = None) -> None:
    """Fill the terminal with one look after another; while the shared state is lost, the last one stays and says so."""
    console = console or Console()
    loop, redraw = asyncio.get_running_loop(), asyncio.Event()
    shown = _Shown()
    loop.add_signal_handler(signal.SIGWINCH, redraw.set)
    try:
        with _keys(stopped), Live(console=console, screen=True, auto_refresh=False) as live:

            def draw() -> None:
                live.update(shown.page(console.width, console.height), refresh=True)

            looking = asyncio.create_task(_look_again(read, interval_s, shown, redraw))
            try:
                while not stopped.is_set():
                    await _either(stopped, redraw)
                    redraw.clear()
                    draw()
            finally:
                looking.cancel()
                await asyncio.wait({looking})
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


class _Shown:
    """What the screen shows: the last look that succeeded, and what has been wrong since."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.problem = ""

    def page(self, width: int, height: int) -> RenderableType:
        if self.snapshot is None:
            return Text(self.problem or "looking ...")
        snapshot = self.snapshot
        if self.problem:
            snapshot = replace(snapshot, notes=(f"as of {snapshot.taken_at}: {self.problem}", *snapshot.notes))
        return screen(snapshot, width, height, _HINT)


async def _look_again(read: Read, interval_s: float, shown: _Shown, redraw: asyncio.Event) -> None:
    while True:
        try:
            shown.snapshot, shown.problem = await read(), ""
        except StateUnavailableError as error:
            shown.problem = str(error)
        redraw.set()
        await asyncio.sleep(interval_s)


@contextlib.contextmanager
def _keys(stopped: asyncio.Event) -> Iterator[None]:
    """Hear single keys of a terminal; it is as before afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def heard() -> None:
        keys = os.read(descriptor, 64).decode(errors="replace")
        if not keys or QUIT_KEYS & set(keys):
            stopped.set()
            loop.remove_reader(descriptor)

    try:
        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, heard)
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


async def _either(*events: asyncio.Event) -> None:
    waits = {asyncio.create_task(event.wait()) for event in events}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _pause(stopped: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopped.wait(), seconds)


def plain_width() -> int:
    """Columns to print for: the terminal's, or what COLUMNS says, or enough for every column that matters."""
    try:
        return int(os.environ["COLUMNS"])
    except (KeyError, ValueError):
        pass
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return _PLAIN_WIDTH
