"""A plan's result as text for people: its layouts as a table, with the explanation below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def plan_table(columns: Sequence[str], rows: Sequence[Sequence[str]], load: str, result: dict[str, Any]) -> str:
    """The text of a plan.

    Args:
        rows: per layout, the cells of the columns.
        load: GPUs and session rate of the plan.
        result: as `ampd plan --json` prints it.
    """
    table = [columns, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(columns))]
    lines = [
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in table)
    ]
    slo = result["slo"]
    head = f"{load}, TTFT {slo['ttft'] * 1e3:g} ms, ITL {slo['itl'] * 1e3:g} ms: planned in {result['seconds']:.1f} s"
    written = [f"Manifest: {result['manifest']}"] if result["manifest"] else []
    return "\n".join([head, "", *lines, "", *result["explanation"], *written])
