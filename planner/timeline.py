"""What every worker did when, as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

Format: "Trace Event Format" of Chromium; times in microseconds. A worker is a process, its lanes are threads; arrows
lead from a round's remote prefill to the read of its increment.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ampd.errors import RunError
from planner.simulator.outcome import SimulationRun, Span

_LANES = {"compute": 1, "kv-in": 2}
_US = 1e6


def trace_events(run: SimulationRun) -> Iterator[dict[str, Any]]:
    """The events of a run that kept its timeline."""
    processes = {worker_id: number for number, worker_id in enumerate(run.worker_roles, start=1)}
    for worker_id, pid in processes.items():
        yield _named("process_name", pid, 0, worker_id)
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for lane, tid in _LANES.items():
            yield _named("thread_name", pid, tid, lane)
    for span in run.timeline:
        yield _complete(span, processes[span.worker_id])
    yield from _batches(run, processes)
    yield from _arrows(run, processes)


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: Span, pid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.kind,
        "cat": span.lane,
        "pid": pid,
        "tid": _LANES[span.lane],
        "ts": span.start_s * _US,
        "dur": (span.end_s - span.start_s) * _US,
        "args": dict(span.detail),
    }


def _batches(run: SimulationRun, processes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The size of every decode batch, as a counter."""
    for span in run.timeline:
        if span.kind == "decode":
            for at_s, batch in ((span.start_s, span.detail["batch"]), (span.end_s, 0)):
                yield {
                    "ph": "C",
                    "name": "decode batch",
                    "pid": processes[span.worker_id],
                    "tid": 0,
                    "ts": at_s * _US,
                    "args": {"sequences": batch},
                }


def _arrows(run: SimulationRun, processes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """From the end of a remote prefill to the read of its increment at the decode worker."""
    last: dict[str, Span] = {}
    number = 0
    for span in run.timeline:
        session = span.detail.get("session", "")
        if span.kind == "prefill":
            last[session] = span
        elif span.kind == "kv-increment" and session in last:
            number += 1
            common = {"name": "hand-over", "cat": "kv", "id": number}
            prefill = last[session]
            yield common | {
                "ph": "s",
                "pid": processes[prefill.worker_id],
                "tid": _LANES["compute"],
                "ts": prefill.end_s * _US,
            }
            yield common | {
                "ph": "f",
                "bp": "e",
                "pid": processes[span.worker_id],
                "tid": _LANES["kv-in"],
                "ts": span.start_s * _US,
            }


def write_timeline(run: SimulationRun, path: Path) -> None:
    """Write the trace, packed if the name ends in `.gz`. Raises `RunError` if it cannot be written."""
    text = json.dumps({"traceEvents": list(trace_events(run)), "displayTimeUnit": "ms"})
    try:
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None
