"""The activity of every worker as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Format: "Trace Event Format" of Chromium, with times in microseconds. A worker is a process and its lanes are threads.
Arrows lead from a round's remote prefill to the read of its increment. Bars of one thread may nest but not cross, so
that overlapping reads are on separate threads (`kv-in`, `kv-in 2`, ...).
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ampd.errors import RunError
from planner.simulator.outcome import SimulationRun, Span

_LANES = {"compute": 1, "kv-in": 2}
"""First thread of a lane. The lane with the highest number may have more threads after it."""
_US = 1e6


def trace_events(run: SimulationRun) -> Iterator[dict[str, Any]]:
    processes = {worker_id: number for number, worker_id in enumerate(run.worker_roles, start=1)}
    threads = _threads(run.timeline)
    most = Counter[str]()
    for span, tid in zip(run.timeline, threads, strict=True):
        most[span.worker_id] = max(most[span.worker_id], tid)
    for worker_id, pid in processes.items():
        yield _named("process_name", pid, 0, worker_id)
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for lane, tid in _LANES.items():
            yield _named("thread_name", pid, tid, lane)
        for tid in range(_LANES["kv-in"] + 1, most[worker_id] + 1):
            yield _named("thread_name", pid, tid, f"kv-in {tid - _LANES['kv-in'] + 1}")
    for span, tid in zip(run.timeline, threads, strict=True):
        yield _complete(span, processes[span.worker_id], tid)
    yield from _batches(run, processes)
    yield from _arrows(run, processes, threads)


def _threads(spans: Sequence[Span]) -> list[int]:
    """Thread number of every span. A read gets the first thread of its lane that is free."""
    threads = [_LANES[span.lane] for span in spans]
    ends: dict[str, list[float]] = {}
    for position in sorted(range(len(spans)), key=lambda position: spans[position].start_s):
        span = spans[position]
        if span.lane == "kv-in":
            taken = ends.setdefault(span.worker_id, [])
            lane = next((lane for lane, end_s in enumerate(taken) if end_s <= span.start_s), len(taken))
            taken[lane : lane + 1] = [span.end_s]
            threads[position] += lane
    return threads


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: Span, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.kind,
        "cat": span.lane,
        "pid": pid,
        "tid": tid,
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


def _arrows(run: SimulationRun, processes: dict[str, int], threads: Sequence[int]) -> Iterator[dict[str, Any]]:
    """From the end of a remote prefill to the read of its increment at the decode worker."""
    last: dict[str, Span] = {}
    number = 0
    for span, tid in zip(run.timeline, threads, strict=True):
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
                "tid": tid,
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
