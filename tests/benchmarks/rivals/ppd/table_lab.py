"""Routing tables for tests."""

from __future__ import annotations

from typing import Any

AXES: dict[str, list[float]] = {
    "context_tokens_from": [0, 1, 5000],
    "increment_tokens_from": [0, 100, 1000],
    "output_tokens_from": [0, 200],
    "load_from": [0.0, 0.5],
}


def document(*local: tuple[int, int, int, int]) -> dict[str, Any]:
    """A table that is remote but for the cells at these positions on its axes."""
    context, increment, output, load = AXES.values()
    rows = [
        {
            "context_tokens_from": first_context,
            "increment_tokens_from": first_increment,
            "output_tokens_from": first_output,
            "by_load": ["local" if (c, i, o, k) in local else "remote" for k in range(len(load))],
        }
        for c, first_context in enumerate(context)
        for i, first_increment in enumerate(increment)
        for o, first_output in enumerate(output)
    ]
    return {"expected_output_tokens": 50.0, **AXES, "rows": rows}
