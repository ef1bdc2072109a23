"""`make demo`: start a graph with `ampd serve`, replay a shipped trace with `ampd replay`, leave a report."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import Field

from ampd.child_process import tied_to_parent
from ampd.cli.serve.settings import EngineName
from ampd.errors import RunError, guarded
from ampd.settings import Settings, parse_settings

# -- runs a graph as a child process: starts it with `ampd serve`, and stops it at the end of the block

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


class DemoSettings(Settings):
    """Start a small graph, replay a real trace of agent sessions against it and write a report."""

    engine: EngineName = Field(
        EngineName.SGLANG, description="sglang: real engines; modelled: no engines, more workers."
    )
    out: str = Field("out", description="Folder for the report and the result.")


@dataclass(frozen=True, slots=True)
class _Scene:
    """The demo of one engine: flags of `ampd serve` and `ampd replay`, and a note on the figures."""

    serve: tuple[str, ...]
    replay: tuple[str, ...]
    note: str


SCENES = {
    EngineName.SGLANG: _Scene(
        # Nothing is refused because it would be late: on a slow machine that would look like a fault.
        serve=("--prefill", "1", "--decode", "1", "--ttft", "1.5", "--itl", "0.2", "--max-wait", "0"),
        replay=("--limit", "12", "--ttft", "1.5", "--itl", "0.2", "--time-scale", "0.2"),
        note="real engines on a tiny random model: the figures show that the graph works and how long this machine "
        "takes; on a busy CPU targets are missed",
    ),
    EngineName.MODELLED: _Scene(
        serve=(
            *("--prefill", "2", "--decode", "4", "--perf", "qwen3-32b-h20", "--tp", "4"),
            *("--ttft", "0.5", "--itl", "0.05", "--max-wait", "0"),
        ),
        replay=("--rate", "2", "--limit", "40", "--ttft", "0.5", "--itl", "0.05"),
        note="the engines slept as long as the performance model says of Qwen3-32B on H20, four GPUs per "
        "worker; everything else is real, so that a machine that is busy with other programs misses targets",
    ),
}
TRACE = "tau-bench-airline"


def run(argv: Sequence[str]) -> int:
    settings = parse_settings(DemoSettings, argv, "make demo")
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    scene = SCENES[settings.engine]
    serve = ["--engine", settings.engine, "--port", "0", *scene.serve]
    report, result = out / "demo.html", out / "demo.json"
    print(f"$ ampd serve {' '.join(serve)}", flush=True)
    with running_graph(serve, lambda line: print(line, flush=True)) as url:
        replay = [TRACE, "--url", url, "--report", str(report), "--json", str(result), *scene.replay]
        print(f"$ ampd replay {' '.join(replay)}", flush=True)
        code = subprocess.run([*ampd_command("replay"), *replay], check=False).returncode
    print(f"note: {scene.note}\nreport: {report}\nresult: {result}")
    return code


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
