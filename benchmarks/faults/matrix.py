"""The matrix: all cells, as JSON and as tables for docs/reliability.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from benchmarks.faults.cell import CellResult, p99
from benchmarks.faults.fault import Fault
from benchmarks.faults.faults import NONE
from benchmarks.faults.moments import Moment


def tables(results: Sequence[CellResult], faults: Mapping[str, Fault]) -> str:
    """Markdown: for each group of faults one table, a row per fault and a column per moment."""
    reference = {moment: _of(results, NONE.name, moment) for moment in Moment}
    shown = [fault for fault in (NONE, *faults.values()) if any(result.fault == fault.name for result in results)]
    parts = [_totals(results, faults)]
    for group, members in groupby(shown, key=lambda fault: fault.group):
        moments = [moment for moment in Moment if any(result.moment == moment for result in results)]
        counts = ("failed", "lost", "wrong", "left")
        heads = ["fault", "aim", *(moment.label for moment in moments), *counts, "added P99 TTFT"]
        rows = list(members)
        lines = [f"### {group}", "", _commits(results, rows), "", _row(heads), _row(["---"] * len(heads))]
        lines += [_fault_row(fault, moments, results, reference) for fault in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _commits(results: Sequence[CellResult], faults: Sequence[Fault]) -> str:
    """The code that the runs of a table are of, in the order of the runs."""
    names = {fault.name for fault in faults}
    return f"Commit: {', '.join(dict.fromkeys(result.commit for result in results if result.fault in names))}."


def _fault_row(
    fault: Fault,
    moments: Sequence[Moment],
    results: Sequence[CellResult],
    reference: Mapping[Moment, Sequence[CellResult]],
) -> str:
    own = _of(results, fault.name)
    cells = [_cell(_of(own, fault.name, moment), reference[moment], fault.aim_s) for moment in moments]
    counts = [str(sum(getattr(result, name) for result in own)) for name in ("failed", "lost", "wrong", "left")]
    added = [
        p99(_ttfts(_of(own, fault.name, moment))) - p99(_ttfts(reference[moment]))
        for moment in moments
        if _of(own, fault.name, moment)
    ]
    aim = f"{fault.aim_s:g} s{' of wait' * fault.lasts}"
    return _row([f"`{fault.name}`: {fault.what}", aim, *cells, *counts, f"{max(added):+.2f} s"])


def _cell(runs: Sequence[CellResult], reference: Sequence[CellResult], aim_s: float) -> str:
    """`completed/accepted`, and by how much longer than without a fault the disturbed sessions waited."""
    if not runs:
        return "-"
    completed, accepted = sum(run.completed for run in runs), sum(run.accepted for run in runs)
    recover_s = max(_recover_s(run, reference) for run in runs)
    mark = " **violated**" if any(run.violations for run in runs) else ""
    if any(_is_late(run, reference, aim_s) for run in runs):
        mark += " **late**"
    return f"{completed}/{accepted}, {recover_s:.1f} s{mark}"


def _recover_s(run: CellResult, reference: Sequence[CellResult]) -> float:
    usual_s = median(other.recover_s for other in reference) if reference else 0.0
    return max(0.0, run.recover_s - usual_s)


def _is_late(run: CellResult, reference: Sequence[CellResult], aim_s: float) -> bool:
    """Whether a run took longer than its aim, by more than the harness' own clock may be wrong."""
    return _recover_s(run, reference) > aim_s + run.lag_s


def _totals(results: Sequence[CellResult], faults: Mapping[str, Fault]) -> str:
    counts = {
        name: sum(getattr(result, name) for result in results)
        for name in ("accepted", "completed", "failed", "lost", "wrong", "left")
    }
    violated = sum(bool(result.violations) for result in results)
    late = sum(
        _is_late(result, _of(results, NONE.name, Moment(result.moment)), faults[result.fault].aim_s)
        for result in results
        if result.fault in faults
    )
    rounds = ", ".join(f"{count} {name}" for name, count in counts.items())
    return (
        f"{len(results)} runs. Rounds: {rounds}. Runs with a violated invariant: {violated}. "
        f"Runs that took longer to recover than their aim: {late}."
    )


def as_json(results: Iterable[CellResult]) -> list[dict[str, Any]]:
    """One object per run."""
    return [result.as_dict() for result in results]


def _of(results: Iterable[CellResult], fault: str, moment: Moment | None = None) -> list[CellResult]:
    return [result for result in results if result.fault == fault and moment in (None, result.moment)]


def _ttfts(results: Iterable[CellResult]) -> list[float]:
    return [ttft_s for result in results for ttft_s in result.ttfts_s]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
