"""From measured points to a profile, with its error on held-out points."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ampd.errors import RunError
from ampd.perf.fit import fit_decode, fit_prefill, fit_transfer
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.profile import ParallelismCurves, PerformanceProfile, Provenance
from ampd.types import Parallelism
from planner.profiler.grid import split
from planner.profiler.measure import Points

_FEWEST = 3


def fit_profile(
    points: Points,
    provenance: Provenance,
    tp: int,
    held_out_share: float,
    seed: int,
    *,
    kv_capacity_tokens: int | None = None,
    kv_bytes_per_token: int | None = None,
    max_context_tokens: int | None = None,
) -> PerformanceProfile:
    """Fit all curves. `fit_error` of the provenance has the mean and the largest relative error on held-out points.

    Raises:
        RunError: too few points were measured.
    """
    for name, curve in (("prefill", points.prefill), ("decode", points.decode), ("transfer", points.transfer)):
        if len(curve) < _FEWEST:
            raise RunError(f"only {len(curve)} {name} points could be measured, a fit needs {_FEWEST}")
    prefill, held_prefill = split(points.prefill, held_out_share, seed)
    decode, held_decode = split(points.decode, held_out_share, seed)
    transfer, held_transfer = split(points.transfer, held_out_share, seed)
    profile = PerformanceProfile(
        provenance=provenance,
        workers=(
            ParallelismCurves(
                tp=tp,
                prefill=fit_prefill(prefill),
                decode=fit_decode(decode),
                kv_capacity_tokens=kv_capacity_tokens,
            ),
        ),
        kv_transfers=(fit_transfer(transfer, tp, tp),),
        kv_bytes_per_token=kv_bytes_per_token,
        max_context_tokens=max_context_tokens,
    )
    errors = _errors(PiecewiseModel(profile), Parallelism(tp), held_prefill, held_decode, held_transfer)
    counts = {"prefill": len(held_prefill), "decode": len(held_decode), "kv_transfer": len(held_transfer)}
    about = provenance.assumptions | {f"held_out_{name}": float(count) for name, count in counts.items()}
    with_errors = provenance.model_copy(update={"fit_error": errors, "assumptions": about})
    return profile.model_copy(update={"provenance": with_errors})


def _errors(
    model: PiecewiseModel,
    theta: Parallelism,
    prefill: Sequence[tuple[int, int, float]],
    decode: Sequence[tuple[int, int, float]],
    transfer: Sequence[tuple[int, float]],
) -> dict[str, float]:
    by_curve = {
        "prefill": [(model.prefill_s(hist, incr, theta), seconds) for hist, incr, seconds in prefill],
        "decode": [(model.decode_step_s(batch, context, theta), seconds) for batch, context, seconds in decode],
        "kv_transfer": [(model.kv_transfer_s(tokens, theta, theta), seconds) for tokens, seconds in transfer],
    }
    return _summary(by_curve)


def _summary(by_curve: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Mean and largest relative error of (predicted, measured) pairs, by curve."""
    errors: dict[str, float] = {}
    for name, pairs in by_curve.items():
        values = [abs(predicted - measured) / measured for predicted, measured in pairs]
        if values:
            errors[f"{name}_mean"] = round(statistics.fmean(values), 4)
            errors[f"{name}_max"] = round(max(values), 4)
    return errors
