"""Fits the curves of a profile to measured points: non-negative least squares on relative errors.

A segment's costs are linear, so the fit is exact for given breakpoints. Breakpoints are added one at a time where they
reduce the error most, as long as the Bayesian information criterion improves. Coefficients are never negative, so that
predicted times never fall when the amount of work grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from ampd.perf.profile import DecodeCurve, Piece, PrefillCurve, PrefillSegment, TransferCurve

PrefillPoint = tuple[int, int, float]
"""(history tokens, new tokens, seconds)."""
DecodePoint = tuple[int, int, float]
"""(sequences, tokens of context of all of them, seconds of a step)."""
TransferPoint = tuple[int, float]
"""(tokens, seconds)."""

_Array = NDArray[np.float64]
_Design = Callable[[Sequence[int]], _Array]
_MAX_SEGMENTS = 5
_POINTS_PER_SEGMENT = 5
_LEAST_ERROR = 1e-9
"""Relative error below which a fit counts as exact and gets no further breakpoint."""


def fit_prefill(points: Sequence[PrefillPoint]) -> PrefillCurve:
    """The prefill curve of the points; `ValueError` without points."""
    hist, incr, seconds = _columns(points, 3)

    def design(starts: Sequence[int]) -> _Array:
        columns = [np.ones_like(incr), hist, hist * hist]
        for start, inside in _inside(incr, starts):
            columns += [inside, inside * (hist + start + 0.5 * inside)]
        return np.column_stack(columns)

    starts, found = _fit(design, incr, seconds, parameters=2)
    return PrefillCurve(
        history_s_per_token=found[1],
        history_s_per_token2=found[2],
        segments=tuple(
            PrefillSegment(
                from_incr_tokens=start,
                alpha_s=found[0] if index == 0 else 0.0,
                beta_s_per_token=found[3 + 2 * index],
                gamma_s_per_token2=found[4 + 2 * index],
            )
            for index, start in enumerate(starts)
        ),
    )


def fit_decode(points: Sequence[DecodePoint]) -> DecodeCurve:
    """The decode curve of the points; `ValueError` without points."""
    batch, context, seconds = _columns(points, 3)
    pieces, (context_s,) = _fit_line(batch, [context], seconds)
    return DecodeCurve.of(context_s, pieces)


def fit_transfer(points: Sequence[TransferPoint], tp_source: int, tp_target: int) -> TransferCurve:
    """The transfer curve of the points; `ValueError` without points."""
    tokens, seconds = _columns(points, 2)
    pieces, _ = _fit_line(tokens, [], seconds)
    return TransferCurve.of(tp_source, tp_target, pieces)


def _fit_line(values: _Array, others: Sequence[_Array], seconds: _Array) -> tuple[list[Piece], list[float]]:
    """Segments over `values`, and the coefficient of each of the `others`."""

    def design(starts: Sequence[int]) -> _Array:
        return np.column_stack([np.ones_like(values), *others, *(part for _, part in _inside(values, starts))])

    starts, (alpha_s, *found) = _fit(design, values, seconds, parameters=1)
    slopes_s = found[len(others) :]
    pieces = [
        (start, alpha_s if index == 0 else 0.0, slope_s)
        for index, (start, slope_s) in enumerate(zip(starts, slopes_s, strict=True))
    ]
    return pieces, found[: len(others)]


def _columns(points: Sequence[Sequence[float]], count: int) -> list[_Array]:
    if not points:
        raise ValueError("no points to fit")
    table = np.asarray(points, dtype=float)
    return [table[:, column] for column in range(count)]


def _inside(values: _Array, starts: Sequence[int]) -> list[tuple[int, _Array]]:
    """For every segment its start, and how much of each value lies in it."""
    ends = [*starts[1:], np.inf]
    return [(start, np.clip(values - start, 0.0, end - start)) for start, end in zip(starts, ends, strict=True)]


def _fit(design: _Design, values: _Array, seconds: _Array, parameters: int) -> tuple[Sequence[int], list[float]]:
    """Starts and coefficients; `parameters`: coefficients that each further segment adds."""
    chosen = [0]
    found, error = _solve(design(chosen), seconds)
    candidates = {int(value) for value in np.unique(values)[1:-1]}
    most = min(_MAX_SEGMENTS, len(seconds) // _POINTS_PER_SEGMENT)
    while candidates and len(chosen) < most and error > len(seconds) * _LEAST_ERROR**2:
        fits = {start: _solve(design(sorted([*chosen, start])), seconds) for start in sorted(candidates)}
        best = min(fits, key=lambda start: fits[start][1])
        gain = len(seconds) * log(error / max(fits[best][1], 1e-300))
        if gain <= (parameters + 1) * log(len(seconds)):
            break
        chosen = sorted([*chosen, best])
        found, error = fits[best]
        candidates.discard(best)
    return chosen, found


def _solve(columns: _Array, seconds: _Array) -> tuple[list[float], float]:
    """Coefficients >= 0 and the sum of squared relative errors. Columns are scaled because they differ by 10^9."""
    rows = columns / seconds[:, None]
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0.0] = 1.0
    found, residual = nnls(rows / scale, np.ones_like(seconds), maxiter=100 * rows.shape[1])
    return [float(value) for value in found / scale], float(residual) ** 2
