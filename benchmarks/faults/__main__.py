"""Faults at the moments of a round, on a live graph.

    python -m benchmarks.faults [--engine NAME] [--fault NAME ...] [--moment NAME ...] [--repeats N]
        [--json | --markdown]

With `--records FILE` each run is appended to the file, and runs that are in it already are not made again. The exit
is 1 if an invariant was violated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

from ampd.child_process import exit_now
from benchmarks.commit import commit
from benchmarks.faults.cell import CellResult, CellRunner, p99
from benchmarks.faults.cluster import live_graph
from benchmarks.faults.fault import Fault
from benchmarks.faults.faults import FAULTS, NONE
from benchmarks.faults.matrix import as_json, tables
from benchmarks.faults.moments import Moment
from benchmarks.faults.setting import SETTINGS, Setting, modelled


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen cells and print the matrix."""
    options = _options(argv)
    setting = SETTINGS[options.engine]()
    if unknown := [name for name in options.fault or () if name not in setting.faults]:
        print(f"--fault: not with --engine {options.engine}: {', '.join(unknown)}; known: {', '.join(setting.faults)}")
        return 2
    chosen = {name: setting.faults[name] for name in options.fault or setting.faults}
    moments = [Moment(name) for name in options.moment] or list(setting.moments)
    with tempfile.TemporaryDirectory(prefix="ampd-faults-") as name:
        folder = options.logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        records = Records(options.records)
        results = asyncio.run(run(folder, list(chosen.values()), moments, options.repeats, records, setting))
    print(json.dumps(as_json(results), indent=1) if options.json else tables(results, chosen))
    return int(any(result.violations for result in results))


async def run(
    folder: Path,
    faults: Sequence[Fault],
    moments: Sequence[Moment],
    repeats: int,
    records: Records | None = None,
    setting: Setting | None = None,
) -> list[CellResult]:
    """All cells on one graph; a graph that a fault has left unusable is replaced."""
    records, setting = records or Records(None), setting or modelled()
    cells = [
        (fault, moment)
        for _ in range(repeats)
        for fault in (NONE, *faults)
        for moment in moments
        if moment not in fault.never_at
    ]
    results = records.take(cells)
    missing = deque(cell for cell in cells if not records.has_taken(cell))
    while missing:
        async with live_graph(Path(tempfile.mkdtemp(dir=folder)), setting.kind) as graph:
            runner = setting.runner(graph)
            await runner.start()
            while missing:
                result = await _run_cell(runner, *missing.popleft())
                records.add(result)
                results.append(result)
                if any(text.startswith(_UNUSABLE) for text in result.violations):
                    break
    return results


_UNUSABLE = "the run failed"


class Records:
    """The file of earlier runs; without a file there are none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._earlier: Counter[tuple[str, str]] = Counter()

    def take(self, cells: Sequence[tuple[Fault, Moment]]) -> list[CellResult]:
        """The earlier runs of these cells."""
        if self._path is None or not self._path.exists():
            return []
        wanted = {(fault.name, moment.value) for fault, moment in cells}
        runs = [CellResult(**json.loads(line)) for line in self._path.read_text("utf-8").splitlines()]
        runs = [result for result in runs if (result.fault, result.moment) in wanted]
        self._earlier.update((result.fault, result.moment) for result in runs)
        return runs

    def has_taken(self, cell: tuple[Fault, Moment]) -> bool:
        """Whether an earlier run stands for this one; it stands for one only."""
        key = (cell[0].name, cell[1].value)
        self._earlier[key] -= 1
        return self._earlier[key] >= 0

    def add(self, result: CellResult) -> None:
        """Append a run."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result.as_dict()) + "\n")


async def _run_cell(runner: CellRunner, fault: Fault, moment: Moment) -> CellResult:
    start_s, code = time.monotonic(), commit()
    try:
        result = await runner.run(fault, moment)
    except Exception as error:
        traceback.print_exc()
        result = CellResult(fault.name, moment.value, violations=[f"{_UNUSABLE}: {error!r}"])
    result.commit = code
    line = f"{fault.name} x {moment.label}: {result.completed}/{result.accepted} completed, {result.failed} failed"
    line += f", {result.lost} lost, {result.wrong} wrong, {result.recover_s:.2f} s to recover"
    line += f", P99 TTFT {p99(result.ttfts_s):.2f} s"
    print(f"{line} ({time.monotonic() - start_s:.1f} s, lag {result.lag_s:.2f} s)", file=sys.stderr, flush=True)
    for text in (*result.violations, *result.errors):
        print(f"    {'VIOLATION: ' if text in result.violations else ''}{text}", file=sys.stderr, flush=True)
    return result


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"faults: {', '.join(FAULTS)}",
    )
    parser.add_argument("--engine", choices=list(SETTINGS), default="modelled", help="engine of the workers")
    parser.add_argument("--fault", action="append", metavar="NAME", help="default: all")
    parser.add_argument("--moment", action="append", choices=list(Moment), default=[], help="default: all")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each cell")
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes in this folder")
    parser.add_argument("--records", type=Path, help="file of runs, as lines of JSON: continued if it exists")
    parser.add_argument("--json", action="store_true", help="print one object per run")
    parser.add_argument("--markdown", action="store_true", help="print tables (the default)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_now(main())
