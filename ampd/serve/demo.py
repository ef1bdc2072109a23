"""`make demo`: start a graph with `ampd serve`, replay a shipped trace with `ampd replay`, leave a report."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from ampd.cli import guarded
from ampd.errors import RunError
from ampd.serve.settings import EngineName
from ampd.settings import Settings, parse_settings

_STOP_S = 30.0


class DemoSettings(Settings):
    """Start a small graph, replay a real trace of agent sessions against it and write a report."""

    engine: EngineName = Field(
        EngineName.SGLANG, description="sglang: real engines; modelled: no engines, more workers."
    )
    out: str = Field("out", description="Folder for the report and the result.")


@dataclass(frozen=True, slots=True)
class _Scene:
    """What one engine's demo starts and replays."""

    serve: tuple[str, ...]
    replay: tuple[str, ...]


SCENES = {
    EngineName.SGLANG: _Scene(
        serve=("--prefill", "1", "--decode", "1", "--ttft", "0.8", "--itl", "0.2"),
        replay=("--limit", "12", "--ttft", "0.8", "--itl", "0.2", "--time-scale", "0.2"),
    ),
    EngineName.MODELLED: _Scene(
        serve=("--prefill", "2", "--decode", "4", "--ttft", "0.5", "--itl", "0.05"),
        replay=("--rate", "2", "--limit", "40", "--ttft", "0.5", "--itl", "0.05", "--time-scale", "0.2"),
    ),
}
TRACE = "tau-bench-airline"


def run(argv: Sequence[str]) -> int:
    """Run the demo; the exit code is the replay's."""
    settings = parse_settings(DemoSettings, argv, "make demo")
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    scene = SCENES[settings.engine]
    graph = _start_graph([*_ampd("serve"), "--engine", settings.engine, "--port", "0", *scene.serve])
    try:
        url = _wait_ready(graph)
        report, result = out / "demo.html", out / "demo.json"
        replay = [*_ampd("replay"), TRACE, "--url", url, "--report", str(report), "--json", str(result), *scene.replay]
        print(f"$ ampd {' '.join(replay[3:])}", flush=True)
        code = subprocess.run(replay, check=False).returncode
    finally:
        _stop(graph)
    print(f"report: {report}\nresult: {result}")
    return code


def _ampd(command: str) -> list[str]:
    return [sys.executable, "-m", "ampd", command]


def _start_graph(argv: list[str]) -> subprocess.Popen[str]:
    print(f"$ ampd {' '.join(argv[3:])}", flush=True)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def _wait_ready(graph: subprocess.Popen[str]) -> str:
    assert graph.stdout is not None
    for line in graph.stdout:
        print(line, end="", flush=True)
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


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
