"""Runs the stages of a GPU day, the most valuable first, and writes their rows as they come.

    python -m tools.gpu_day [--device cpu] [--limit-s 300] [--stages fence pinning] [--commit HASH] [--out FOLDER]

Each stage is a process with a time limit. It cannot fail the next one. A stage is skipped if a row of it for the same
commit and device is in the folder of the results or in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commit import commit

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu"

STAGES: dict[str, float] = {"fence": 60.0, "tests": 120.0, "pinning": 60.0, "copies": 150.0}
"""By name, the longest time in seconds, in the order of their value."""

_LEAST_S = 5.0
"""A stage does not begin with less time than this."""


def is_done(stage: str, of_commit: str, device: str, folders: Sequence[Path]) -> bool:
    """Whether one of the folders has a row of a stage for a commit and a device."""
    files = [folder / f"{stage}.jsonl" for folder in folders]
    rows = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    return any((row["commit"], row["device"]) == (of_commit, device) for row in rows)


def lines_of(argv: Sequence[str], limit_s: float) -> Iterator[str]:
    """What a process prints, line by line. After the limit it is killed with all that it has started.

    Raises:
        TimeoutError: the limit was reached.
        RuntimeError: the process failed.
    """
    until_s = time.monotonic() + limit_s
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    rest = b""
    try:
        while True:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, until_s - time.monotonic()))
            if not ready:
                raise TimeoutError(f"it was ended after {limit_s:g} s")
            if not (data := os.read(process.stdout.fileno(), 1 << 16)):
                break
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode() for line in lines)
        if process.wait(max(1.0, until_s - time.monotonic())):
            raise RuntimeError(f"it failed with code {process.returncode}")
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"it was ended after {limit_s:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def run_stage(stage: str, argv: Sequence[str], limit_s: float, common: dict[str, Any], file: Path) -> None:
    """Run one stage. Its last row tells how it ended."""
    started_s, error = time.monotonic(), ""
    file.parent.mkdir(parents=True, exist_ok=True)

    def write(row: dict[str, Any]) -> None:
        line = json.dumps({"stage": stage, **row, **common})
        print(line, flush=True)
        with file.open("a") as rows:
            rows.write(line + "\n")

    try:
        for line in lines_of([*argv, stage, "--device", common["device"]], limit_s):
            if line.startswith("{"):
                write(json.loads(line))
            else:
                print(line, flush=True)
    except (TimeoutError, RuntimeError, ValueError) as failure:
        error = str(failure)
    write({"what": "end", "seconds": round(time.monotonic() - started_s, 1), "error": error})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that are not done yet; returns how many had no time left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--limit-s", type=float, default=sum(STAGES.values()), help="for all stages together")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--commit", default=commit(), help="of the code; without git it must be given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the rows go")
    arguments = parser.parse_args(argv)
    until_s = time.monotonic() + arguments.limit_s
    common = {"device": arguments.device, "commit": arguments.commit}
    program = [sys.executable, "-m", "tools.gpu_day.stages"]
    late = 0
    for stage in arguments.stages:
        left_s = until_s - time.monotonic()
        if is_done(stage, arguments.commit, arguments.device, (RESULTS, arguments.out)):
            print(f"{stage}: there are rows of it for {arguments.commit}", flush=True)
        elif left_s < _LEAST_S:
            late += 1
            print(f"{stage}: no time is left", flush=True)
        else:
            run_stage(stage, program, min(STAGES[stage], left_s), common, arguments.out / f"{stage}.jsonl")
    return late


if __name__ == "__main__":
    sys.exit(main())
