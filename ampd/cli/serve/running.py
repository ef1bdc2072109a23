"""Runs a graph as a child process: starts it with `ampd serve`, and stops it at the end of the block."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from ampd.child_process import tied_to_parent
from ampd.errors import RunError

_STOP_S = 30.0


def ampd_command(command: str) -> list[str]:
    """The `ampd` command of this environment."""
    return [sys.executable, "-m", "ampd", command]


@contextmanager
def running_graph(
    flags: Sequence[str],
    on_line: Callable[[str], None],
    env: Mapping[str, str] | None = None,
    errors: IO[bytes] | None = None,
) -> Iterator[str]:
    """Run `ampd serve` with these flags while the block runs; gives the frontend's URL.

    Args:
        on_line: gets every line that the graph prints.
        env: its whole environment; None: ours.
        errors: where its messages go; None: to our standard error.

    Raises:
        RunError: the graph does not become ready.
    """
    argv = tied_to_parent([*ampd_command("serve"), *flags])
    graph = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
    try:
        yield _ready_url(graph, on_line)
    finally:
        _stop(graph)
        if graph.stdout is not None:
            graph.stdout.close()


def _ready_url(graph: subprocess.Popen[str], on_line: Callable[[str], None]) -> str:
    assert graph.stdout is not None
    for line in graph.stdout:
        on_line(line.rstrip())
        if line.startswith("ready: "):
            return line.split()[1]
    raise RunError(f"the graph did not start (exit code {graph.wait()}); its last lines are above")


def _stop(graph: subprocess.Popen[str]) -> None:
    if graph.poll() is None:
        graph.send_signal(signal.SIGINT)
    try:
        graph.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        graph.kill()
        graph.wait()
