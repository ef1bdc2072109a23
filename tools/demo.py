"""`make demo`: start graphs with `ampd serve`, replay a shipped trace with `ampd replay`, leave a report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pydantic import Field

from ampd.child_process import tied_to_parent
from ampd.cli.serve.settings import EngineName
from ampd.errors import RunError, guarded
from ampd.reports import format_ms, format_share
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
    """The demo of one engine: flags of `ampd serve` and `ampd replay`, and a note on the figures.

    Attributes:
        systems: name -> flags of `ampd serve` for another system, which serves the same trace afterwards.
        why: a sentence about the comparison with them.
    """

    serve: tuple[str, ...]
    replay: tuple[str, ...]
    note: str
    systems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    why: str = ""


_PLAIN = ("--ordering", "fcfs", "--slicing", "whole", "--pools", "static")
"""First come first served, prefills in one piece, roles as at the start."""

SCENES = {
    EngineName.SGLANG: _Scene(
        # Nothing is refused because it would be late: on a slow machine that would look like a fault.
        serve=("--prefill", "1", "--decode", "1", "--ttft", "1.5", "--itl", "0.2", "--max-wait", "0"),
        replay=("--limit", "12", "--ttft", "1.5", "--itl", "0.2", "--time-scale", "0.2"),
        note="real engines on a tiny random model: the figures show that the graph works and how long this machine "
        "takes; on a busy CPU targets are missed; ENGINE=modelled compares systems, because engines that share a CPU "
        "differ more from run to run than systems do",
    ),
    EngineName.MODELLED: _Scene(
        serve=("--perf", "qwen3-32b-h20", "--tp", "2", "--ttft", "1", "--itl", "0.03", "--max-wait", "0"),
        replay=("--rate", "2.5", "--limit", "26", "--seed", "1", "--ttft", "1", "--itl", "0.03"),
        note="the engines slept as long as the performance model says of Qwen3-32B on H20, two GPUs per "
        "worker; everything else is real, so that a machine that is busy with other programs misses targets",
        systems={
            "AMPD": ("--prefill", "1", "--decode", "2"),
            "always remote": ("--prefill", "1", "--decode", "2", "--routing", "always-remote", *_PLAIN),
            "co-located": ("--prefill", "0", "--decode", "3", "--routing", "always-local", *_PLAIN),
        },
        why="with every prefill on the one prefill worker its queue grows; co-located, a prefill in one piece stops "
        "the running rounds of its worker; AMPD prefills each round where it ends first, in parts that the running "
        "rounds can afford",
    ),
}
TRACE = "tau-bench-airline"


def run(argv: Sequence[str]) -> int:
    settings = parse_settings(DemoSettings, argv, "make demo")
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    scene = SCENES[settings.engine]
    report, result = out / "demo.html", out / "demo.json"
    systems = dict(scene.systems) or {"AMPD": ()}
    results = {name: out / f"{name.replace(' ', '-')}.json" for name in systems} | {"AMPD": result}
    for name, flags in systems.items():
        serve = ["--engine", settings.engine, "--port", "0", *scene.serve, *flags]
        code = _served(serve, [TRACE, "--json", str(results[name]), *scene.replay], is_first=name == "AMPD")
        if code:
            return code
    if scene.systems:
        print(f"\n{_comparison(results)}\nwhy: {scene.why}")
    compare = [*map(str, results.values()), "--report", str(report)]
    print(f"$ ampd compare {' '.join(compare)}", flush=True)
    code = subprocess.run([*ampd_command("compare"), *compare], stdout=subprocess.DEVNULL, check=False).returncode
    print(f"note: {scene.note}\nreport: {report}\nresult: {result}")
    return code


def _served(serve: Sequence[str], replay: Sequence[str], *, is_first: bool) -> int:
    """Start a graph and replay the trace against it. Only the first one prints its result. The exit code."""
    print(f"$ ampd serve {' '.join(serve)}", flush=True)
    with running_graph(serve, lambda line: print(line, flush=True)) as url:
        replay = [*replay, "--url", url]
        print(f"$ ampd replay {' '.join(replay)}", flush=True)
        stdout = None if is_first else subprocess.DEVNULL
        return subprocess.run([*ampd_command("replay"), *replay], stdout=stdout, check=False).returncode


def _comparison(results: Mapping[str, Path]) -> str:
    """A line per system."""
    lines = [f"{'':15}{'rounds within both targets':>28}{'sessions':>10}{'TTFT P95':>11}{'mean ITL P95':>14}"]
    for name, path in results.items():
        result = json.loads(path.read_text(encoding="utf-8"))
        reached = result["attainment"]
        lines.append(
            f"{name:15}{format_share(reached['rounds']):>28}{format_share(reached['sessions']):>10}"
            f"{format_ms(result['ttft_s']['p95'], 0):>8} ms{format_ms(result['mean_itl_s']['p95']):>11} ms"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
