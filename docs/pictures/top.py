"""Draw what `ampd top` shows of a graph that really runs.

    python docs/pictures/top.py --out docs/pictures/top.svg

It starts a graph with modelled engines (`ampd serve`), replays a shipped trace against it (`ampd replay`), and draws
what is seen in the middle of it. Nothing in it is invented; only where the shared state is has been left out.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from ampd.cli.top import Target
from ampd.cli.top_screen import Row, page
from ampd.documents import write_document
from ampd.errors import RunError, guarded
from ampd.perf.presets import load_performance_model
from ampd.settings import Settings, parse_settings
from ampd.state.embedded import local_graphs
from tools.demo import ampd_command, running_graph

PROG = "python docs/pictures/top.py"

GRAPH = (
    *("--engine", "modelled", "--prefill", "2", "--decode", "3", "--coordinators", "2", "--port", "0"),
    *("--worker-args", "--kv-capacity-tokens 32768"),
)
TARGETS = ("--ttft", "1.0", "--itl", "0.05")
TRACE = ("tau-bench-airline", "--limit", "80", "--time-scale", "0.5", "--seed", "7")

_THEME = TerminalTheme(
    (250, 250, 250),
    (36, 41, 47),
    [
        (36, 41, 47),
        (207, 34, 46),
        (17, 99, 41),
        (77, 45, 0),
        (9, 105, 218),
        (130, 80, 223),
        (27, 124, 131),
        (110, 119, 129),
    ],
)
# rich's own format loads a font from the network; a page of documentation must not
_SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect fill="#fafafa" stroke="#d0d7de" x="0.5" y="0.5" width="99.9%" height="99.8%" rx="8" />
<g transform="translate(9, 20)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class PictureSettings(Settings):
    """Draw what `ampd top` shows of a graph of modelled engines under a replayed trace."""

    out: Path = Field(Path("docs/pictures/top.svg"), description="SVG file to write.")
    width: int = Field(100, ge=20, description="Columns of the terminal.")
    rate: float = Field(0.5, gt=0, description="Sessions a second that begin.")
    rounds: int = Field(200, ge=1, description="Rounds to wait for before looking.")


def run(argv: Sequence[str]) -> int:
    """Draw the picture; 0."""
    settings = parse_settings(PictureSettings, argv, PROG)
    with running_graph([*GRAPH, *TARGETS], _say) as url:
        replay = [*ampd_command("replay"), *TRACE, "--rate", str(settings.rate), *TARGETS, "--url", url]
        with subprocess.Popen(replay, stdout=sys.stderr) as client:
            try:
                snapshot = asyncio.run(_look(url, settings.rounds, client))
            finally:
                client.kill()
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_document(svg(snapshot, settings.width), settings.out, "picture")
    print(settings.out)
    return 0


def svg(snapshot: Row, width: int) -> str:
    """A snapshot as it looks in a terminal of this width."""
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(page(snapshot))
    return console.export_svg(theme=_THEME, code_format=_SVG, unique_id="top")


async def _look(url: str, rounds: int, client: subprocess.Popen[bytes]) -> Row:
    """The graph as soon as at least `rounds` rounds are in its window."""
    target = _target(url)
    store = await target.connected()
    try:
        while True:
            snapshot = await target.read(store)
            if snapshot["window"]["rounds"] >= rounds:
                return {**snapshot, "state": ""}  # a path of this machine
            if client.poll() is not None:
                raise RunError(
                    f"{PROG}: the replay ended before {rounds} rounds were in the window; use fewer --rounds"
                )
            await asyncio.sleep(0.5)
    finally:
        await store.close()


def _target(url: str) -> Target:
    graph = next(graph for graph in local_graphs() if graph.url == url)
    return Target(graph.state_url, graph.namespace, load_performance_model(graph.perf))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
