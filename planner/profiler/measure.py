"""Measures the points of a grid, round robin over the repeats, so that a drifting machine does not bend a curve."""

from __future__ import annotations

import random
import statistics
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, Field

from planner.profiler.grid import Grid


class Probe(Protocol):
    """An engine to measure. Each call gives seconds, or None if the engine did not run the point as asked."""

    async def prefill_s(self, hist_tokens: int, incr_tokens: int) -> float | None:
        """Time to the first token of a prefill of `incr_tokens` behind KV that is in the engine."""
        ...

    async def decode_step_s(self, batch: int, context_tokens: int) -> float | None:
        """Time of a decode step of `batch` sequences of `context_tokens` each."""
        ...

    async def transfer_s(self, tokens: int) -> float | None:
        """Time to read the KV of `tokens` from another engine."""
        ...


_Count = Annotated[int, Field(ge=0, le=10**12)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Points(BaseModel):
    """Medians of the measurements; also a part of a file of points.

    Attributes:
        prefill: (history, increment, seconds).
        decode: (sequences, tokens of all their contexts, seconds of a step).
        transfer: (tokens, seconds).
        discarded: measurements of points that the engine did not run as asked.
    """

    prefill: list[tuple[_Count, _Count, _Seconds]]
    decode: list[tuple[_Count, _Count, _Seconds]]
    transfer: list[tuple[_Count, _Seconds]]
    discarded: int = 0


async def measure(probe: Probe, grid: Grid, repeats: int, seed: int, on_point: Callable[[], object]) -> Points:
    """Measure every point `repeats` times after one pass to warm up; returns the medians.

    `on_point` is called after each measurement, `(repeats + 1) * len(grid)` times.
    """
    tasks: list[tuple[Any, Callable[[], Awaitable[float | None]]]] = [
        *((("prefill", *point), partial(probe.prefill_s, *point)) for point in grid.prefill),
        *((("decode", *point), partial(probe.decode_step_s, *point)) for point in grid.decode),
        *((("transfer", tokens), partial(probe.transfer_s, tokens)) for tokens in grid.transfer),
    ]
    seen: dict[Any, list[float]] = {key: [] for key, _ in tasks}
    discarded, rng = 0, random.Random(seed)
    for repeat in range(repeats + 1):
        rng.shuffle(tasks)
        for key, task in tasks:
            seconds = await task()
            on_point()
            if repeat == 0:
                continue
            if seconds is None:
                discarded += 1
            else:
                seen[key].append(seconds)
    return _medians(grid, seen, discarded)


def _medians(grid: Grid, seen: dict[Any, list[float]], discarded: int) -> Points:
    points = Points(prefill=[], decode=[], transfer=[], discarded=discarded)
    for hist, incr in grid.prefill:
        if values := seen["prefill", hist, incr]:
            points.prefill.append((hist, incr, statistics.median(values)))
    for batch, context in grid.decode:
        if values := seen["decode", batch, context]:
            points.decode.append((batch, batch * context, statistics.median(values)))
    for tokens in grid.transfer:
        if values := seen["transfer", tokens]:
            points.transfer.append((tokens, statistics.median(values)))
    return points
