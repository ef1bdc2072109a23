"""From measured points to a profile, with its error on held-out points."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ampd.errors import RunError, UserError
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
                tp=tp, prefill=fit_prefill(prefill), decode=fit_decode(decode), kv_capacity_tokens=kv_capacity_tokens
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


def extended(profile: PerformanceProfile, measured: PerformanceProfile) -> PerformanceProfile:
    """A profile with the curves of a further degree of the same model, and with KV moves between it and the others.

    A record of the KV store has the heads of all ranks. So a move does not depend on the two degrees, and the moves
    between two degrees have the curve that was measured for the new one. Figures about the measurement of the new
    degree stand beside those of the profile, with the degree in front (`tp2_points_prefill`).

    Raises:
        UserError: the files are of different models.
    """
    for name, theirs, ours in (
        ("model", profile.provenance.model, measured.provenance.model),
        ("kv_bytes_per_token", profile.kv_bytes_per_token, measured.kv_bytes_per_token),
    ):
        if theirs != ours:
            raise UserError(f"--extend: the file is of another model: its {name} is {theirs}, measured was {ours}")
    (curves,), (moves,) = measured.workers, measured.kv_transfers
    others = [worker for worker in profile.workers if worker.tp != curves.tp]
    pairs = [pair for worker in others for pair in ((worker.tp, curves.tp), (curves.tp, worker.tp))]
    return profile.model_copy(
        update={
            "workers": tuple(sorted((*others, curves), key=lambda worker: worker.tp)),
            "kv_transfers": (
                *(move for move in profile.kv_transfers if curves.tp not in (move.tp_source, move.tp_target)),
                moves,
                *(moves.model_copy(update={"tp_source": source, "tp_target": target}) for source, target in pairs),
            ),
            "provenance": profile.provenance.model_copy(
                update={
                    name: getattr(profile.provenance, name)
                    | {f"tp{curves.tp}_{key}": value for key, value in getattr(measured.provenance, name).items()}
                    for name in ("assumptions", "fit_error")
                }
            ),
        }
    )


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
