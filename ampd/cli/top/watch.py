"""Shows one snapshot after another: a screen in a terminal, lines elsewhere. q, Ctrl-C or SIGTERM ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from ampd.cli.top.render import as_text, screen
from ampd.cli.top.snapshot import Row
from ampd.state.store import StateUnavailableError

Read = Callable[[], Awaitable[Row]]

QUIT_KEYS = frozenset("qQ\x03\x04")
_HINT = "q or Ctrl-C ends"
_WITHOUT_TERMINAL = (100, 24)
"""Columns and lines; COLUMNS and the size of a terminal come first."""


@contextlib.contextmanager
def stopping_signals() -> Iterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set while the block runs."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def print_snapshot(snapshot: Row, *, as_json: bool, indent: int | None = None) -> None:
    """Print a snapshot on stdout, as JSON or as text that is as wide as the terminal."""
    if as_json:
        print(json.dumps(snapshot, indent=indent), flush=True)
    else:
        width = shutil.get_terminal_size(_WITHOUT_TERMINAL).columns
        print(as_text(snapshot, width, colours=sys.stdout.isatty()), end="", flush=True)


async def print_each(read: Read, interval_s: float, stopped: asyncio.Event, *, as_json: bool) -> None:
    """Print one snapshot after another on stdout. A failed read is a line on stderr."""
    while not stopped.is_set():
        try:
            print_snapshot(await read(), as_json=as_json)
            print("" if as_json else "\n", end="", flush=True)
        except StateUnavailableError as error:
            print(f"ampd top: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), interval_s)


async def show_each(read: Read, interval_s: float, stopped: asyncio.Event) -> None:
    """Fill the terminal with one snapshot after another.

    While the shared state is lost, the last snapshot stays on the screen with the reason.
    """
    console, loop, page = Console(), asyncio.get_running_loop(), _Page()
    with _quit_keys(stopped), Live(console=console, screen=True, auto_refresh=False) as live:

        def draw() -> None:
            live.update(page.content(console.width, console.height), refresh=True)

        loop.add_signal_handler(signal.SIGWINCH, draw)
        updates = asyncio.create_task(_update(page, read, interval_s, draw))
        updates.add_done_callback(lambda _: stopped.set())
        try:
            await stopped.wait()
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)
            updates.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await updates


class _Page:
    """The last snapshot that could be read, and the problem since then if there is one."""

    def __init__(self) -> None:
        self.snapshot: Row | None = None
        self.problem = ""

    def content(self, width: int, height: int) -> RenderableType:
        snapshot = self.snapshot
        if snapshot is None:
            return Text(self.problem or "connecting ...")
        if self.problem:
            note = f"as of {snapshot['taken_at']}: {self.problem}"
            snapshot = {**snapshot, "notes": [note, *snapshot["notes"]]}
        return screen(snapshot, width, height, _HINT)


async def _update(page: _Page, read: Read, interval_s: float, draw: Callable[[], None]) -> None:
    while True:
        try:
            page.snapshot, page.problem = await read(), ""
        except StateUnavailableError as error:
            page.problem = str(error)
        draw()
        await asyncio.sleep(interval_s)


@contextlib.contextmanager
def _quit_keys(stopped: asyncio.Event) -> Iterator[None]:
    """Set `stopped` when a quit key is pressed. Afterwards the terminal is in its former mode."""
    if not sys.stdin.isatty():
        yield
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read_keys() -> None:
        keys = os.read(descriptor, 64).decode(errors="replace")
        if not keys or QUIT_KEYS & set(keys):
            stopped.set()
            loop.remove_reader(descriptor)

    try:
        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, read_keys)
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)
