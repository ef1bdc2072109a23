"""How long `ampd serve` takes until it is ready, by phases, and how long the first request then takes.

    python -m benchmarks.start_up [--against CHECKOUT] [--runs 3] [--engine sglang] [--json FILE]
    python -m benchmarks.start_up --demo [--runs 3] [--engine sglang] [--json FILE]

With `--against` it starts the graph of another checkout of this repository in turn with this one. The table has medians
over the runs. CPU time is that of all processes of the graph, until it is ready. A cold run reads no bytecode of
earlier runs (`--cold`), as the first start after an installation.

`--demo` measures what a new user waits for: `make demo` in a clean clone of the last commit, installation included,
until the graph is ready. Then the demo is stopped. Packages come from uv's cache if it has them. A clean clone has no
bytecode, so each start is a cold one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import httpx
import psutil

from ampd.errors import RunError
from benchmarks.circumstances import circumstances, in_words
from tools.demo import running_graph

HERE = Path(__file__).parents[1]
_POLL_S = 0.05
_PHASES = {
    "first worker was started": None,
    "SGLang's own start began": r"Available plugins for group",
    "SGLang's processes are up": r"Engine startup timings",
    "worker is ready": r"worker \w+ is ready",
}
"""Phase -> what the log of each worker then shows; None: the log itself. A phase ends with the last worker."""


def start(checkout: Path, flags: Sequence[str], *, cold: bool) -> dict[str, float]:
    """Start a graph once, and stop it. Returns the seconds until the end of each phase, and the other figures."""
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "logs"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPATH": str(checkout), "PWD": str(checkout)}
        if cold:
            environment["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "bytecode")
        watch = Watch(logs)
        argv = ["--port", "0", "--log-dir", str(logs), *flags]
        with (
            watch,
            contextlib.chdir(checkout),
            Path(os.devnull).open("wb") as errors,
            running_graph(argv, lambda _: None, environment, errors) as url,
        ):
            figures = {"ready": watch.seconds(), "CPU time": _cpu_s()}
            figures["first request"] = _request_s(url)
            figures["second request"] = _request_s(url)
        return watch.reached | figures


def start_demo(engine: str, make: Sequence[str] = ("make", "demo")) -> dict[str, float]:
    """Run `make demo` in a clean clone until the graph is ready. Returns the seconds until then, and the CPU time.

    Raises:
        RunError: the demo ended before.
    """
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", HERE, clone], check=True)
        begun_s = time.monotonic()
        demo = subprocess.Popen(
            [*make, f"ENGINE={engine}"], cwd=clone, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            return _until_ready(demo, begun_s) | {"CPU time of what runs": _cpu_s()}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(demo.pid, signal.SIGINT)
            demo.communicate()


def _until_ready(demo: subprocess.Popen[str], begun_s: float) -> dict[str, float]:
    assert demo.stdout is not None
    reached: dict[str, float] = {}
    for line in demo.stdout:
        if line.startswith("$ ampd serve"):
            reached["installed"] = time.monotonic() - begun_s
        elif line.startswith("ready: "):
            return reached | {"ready": time.monotonic() - begun_s}
    raise RunError(f"the demo was never ready (exit code {demo.wait()})")


class Watch:
    """Notes when the workers' logs show the end of each phase.

    Attributes:
        reached: phase -> seconds since the watch began.
    """

    def __init__(self, logs: Path) -> None:
        self.reached: dict[str, float] = {}
        self._logs = logs
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._begun_s = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._begun_s

    def __enter__(self) -> None:
        self._begun_s = time.monotonic()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_POLL_S):
            self.look()

    def look(self) -> None:
        """Note the phases that have ended by now."""
        texts = [log.read_text(errors="replace") for log in self._logs.glob("*-[0-9].log") if _is_worker(log)]
        for phase, pattern in _PHASES.items():
            if phase not in self.reached and texts and all(not pattern or re.search(pattern, text) for text in texts):
                self.reached[phase] = self.seconds()


def _is_worker(log: Path) -> bool:
    return not log.name.startswith(("coordinator", "frontend"))


def _cpu_s() -> float:
    """CPU time of everything that this process has started and that runs, and of what has ended below it."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _request_s(url: str) -> float:
    body = {"model": "tiny", "prompt": "word " * 400, "max_tokens": 8}
    begun_s = time.monotonic()
    httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
    return time.monotonic() - begun_s


def table(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Rows of medians, with the smallest and the largest run."""
    rows = ["| | " + " | ".join(runs) + " |", "| --- |" + " --- |" * len(runs)]
    for name in next(iter(runs.values()))[0]:
        cells = []
        for figures in runs.values():
            values = sorted(each[name] for each in figures if name in each)
            cells.append(f"{statistics.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})" if values else "")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, for example one of an earlier commit")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--engine", default="sglang")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--demo", action="store_true", help="measure `make demo` in a clean clone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.demo and options.against:
        parser.error("--demo measures a clone of this checkout, so it takes no --against")
    if options.demo and options.cold:
        parser.error("--cold says nothing with --demo: a clean clone starts cold")
    try:
        runs = _runs(_starts(options), options.runs)
    except RunError as error:
        print(f"start_up: {error}", file=sys.stderr)
        return 2
    print("\n" + table(runs))
    if options.json:
        options.json.write_text(json.dumps(runs, indent=1) + "\n")
    return 0


def _runs(
    starts: Mapping[str, Callable[[], dict[str, float]]], count: int
) -> Mapping[str, Sequence[Mapping[str, float]]]:
    """The figures of so many starts of each kind, which take turns."""
    print(f"medians of {count}; {in_words(circumstances())}")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in starts}
    for number in range(count):
        for name, begin in starts.items():
            load = os.getloadavg()[0]
            figures = begin() | {"load before": load}
            runs[name].append(figures)
            print(f"run {number + 1}, {name}: " + ", ".join(f"{key} {value:.1f}" for key, value in figures.items()))
            sys.stdout.flush()
    return runs


def _starts(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, float]]]:
    """What takes turns, by name."""
    if options.demo:
        return {"make demo": partial(start_demo, options.engine)}
    checkouts = {"this checkout": HERE} | ({"the other one": options.against.resolve()} if options.against else {})
    flags = ["--engine", options.engine]
    return {name: partial(start, checkout, flags, cold=options.cold) for name, checkout in checkouts.items()}


if __name__ == "__main__":
    sys.exit(main())
