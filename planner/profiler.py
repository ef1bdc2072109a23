"""Profiles an engine: the grid of its measurements, the measurements, and the fit of a performance model to them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from ampd.errors import RunError, UserError
from ampd.perf.fit import fit_decode, fit_mixed, fit_prefill, fit_transfer
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.profile import ParallelismCurves, PerformanceProfile, Provenance
from ampd.types import Parallelism

# -- the points to measure: prefills by history and increment, decode batches by size and context, KV transfers

Point = TypeVar("Point")
Measurement = tuple[Any, ...]
"""The name of a curve, and a point of it."""


class Density(StrEnum):
    """Number of points: measured in seconds, in minutes, or longer."""

    QUICK = "quick"
    NORMAL = "normal"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Grid:
    """The points of one profile.

    Attributes:
        prefill: (history, increment) in tokens.
        decode: (sequences, context of each in tokens).
        transfer: tokens, of moves between workers and of reloads.
        mixed: (sequences, context of each, increment) of passes that prefill beside a decode batch.
    """

    prefill: tuple[tuple[int, int], ...]
    decode: tuple[tuple[int, int], ...]
    transfer: tuple[int, ...]
    mixed: tuple[tuple[int, int, int], ...] = ()

    def measurements(self) -> list[Measurement]:
        """What is measured, by the curve that gets it."""
        return [
            *(("prefill", *point) for point in self.prefill),
            *(("decode", *point) for point in self.decode),
            *(("transfer", tokens) for tokens in self.transfer),
            *(("reload", tokens) for tokens in self.transfer),
            *(("mixed", *point) for point in self.mixed),
        ]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine."""

    max_context_tokens: int
    kv_capacity_tokens: int
    page_tokens: int


_HISTORIES = {
    Density.QUICK: (0, 512),
    Density.NORMAL: (0, 256, 1024, 2048, 4096, 16_384),
    Density.FULL: (0, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536),
}
_INCREMENTS = {
    Density.QUICK: (16, 64, 256, 768),
    Density.NORMAL: (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096),
    Density.FULL: (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192),
}
_BATCHES = {
    Density.QUICK: (1, 2, 4),
    Density.NORMAL: (1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
    Density.FULL: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
}
_CONTEXTS = {
    Density.QUICK: (128, 512),
    Density.NORMAL: (64, 512, 1500, 8192),
    Density.FULL: (64, 256, 1024, 2048, 4096, 8192, 16_384, 32_768),
}
_MOVES = {
    Density.QUICK: (64, 256, 1024),
    Density.NORMAL: (16, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 16_384),
    Density.FULL: (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16_384, 32_768, 65_536),
}
_MIXED = {
    Density.QUICK: ((2, 4), (64, 256)),
    Density.NORMAL: ((4, 16, 64), (128, 512)),
    Density.FULL: ((4, 16, 64, 128), (128, 512, 1024)),
}
"""Sequences that decode, and increments beside them."""
_DECODED_TOKENS = 64
"""Room for the tokens that a decode batch generates behind its contexts."""
_MEMORY_SHARE = 0.5
"""Share of the KV memory to use. Engines need the remainder for KV that must stay, and for KV that goes next."""


def grid_of(density: Density, limits: Limits, max_tokens: int | None = None) -> Grid:
    """The points of a density within the engine's limits; `max_tokens` leaves out longer contexts.

    Raises:
        UserError: nothing is left.
    """
    longest = min(limits.max_context_tokens - 2, int(_MEMORY_SHARE * limits.kv_capacity_tokens), max_tokens or 1 << 62)
    page = limits.page_tokens
    prefill = tuple(
        (hist, incr)
        for hist in _HISTORIES[density]
        for incr in _INCREMENTS[density]
        if hist + incr <= longest and hist % page == 0
    )
    decode = tuple(
        (batch, context)
        for batch in _BATCHES[density]
        for context in _CONTEXTS[density]
        if context + _DECODED_TOKENS <= longest
        and batch * (context + _DECODED_TOKENS) <= _MEMORY_SHARE * limits.kv_capacity_tokens
    )
    batches, increments = _MIXED[density]
    mixed = tuple(
        (batch, context, incr)
        for batch, context in decode
        for incr in increments
        if batch in batches
        and incr <= longest
        and batch * (context + _DECODED_TOKENS) + incr <= _MEMORY_SHARE * limits.kv_capacity_tokens
    )
    transfer = tuple(tokens for tokens in _MOVES[density] if page <= tokens <= longest)
    if not (prefill and decode and transfer):
        raise UserError(
            f"the grid is empty: contexts up to {longest} tokens remain; give the engine a longer context, more KV "
            "memory, or a higher --max-tokens"
        )
    return Grid(prefill, decode, transfer, mixed)


def split(points: Sequence[Point], share: float, seed: int) -> tuple[list[Point], list[Point]]:
    """(to fit, held out): a random share of the points is held out, never the first or the last."""
    inner = list(range(1, len(points) - 1))
    held = set(random.Random(seed).sample(inner, min(len(inner), round(share * len(points)))))
    return (
        [point for index, point in enumerate(points) if index not in held],
        [points[index] for index in sorted(held)],
    )


# -- measures the points of a grid, round robin over the repeats, so that a drifting machine does not bend a curve


class Probe(Protocol):
    """An engine to measure. Each call gives seconds, or None if the engine did not run the point as asked."""

    async def prefill_s(self, hist_tokens: int, incr_tokens: int) -> float | None:
        """Time to the first token of a prefill of `incr_tokens` behind KV that is in the engine."""
        ...

    async def decode_step_s(self, batch: int, context_tokens: int) -> float | None:
        """Time of a decode step of `batch` sequences of `context_tokens` each."""
        ...

    async def mixed_pass_s(self, batch: int, context_tokens: int, incr_tokens: int) -> float | None:
        """Time of a pass that prefills `incr_tokens` and is a step of `batch` sequences of `context_tokens` each."""
        ...

    async def transfer_s(self, tokens: int) -> float | None:
        """Time to read the KV of `tokens` from the store of another worker."""
        ...

    async def reload_s(self, tokens: int) -> float | None:
        """Time to copy the KV of `tokens` from the store to the device."""
        ...


@dataclass(slots=True)
class Points:
    """Medians of the measurements.

    Attributes:
        prefill: (history, increment, seconds).
        decode: (sequences, tokens of all their contexts, seconds of a step).
        transfer, reload: (tokens, seconds).
        mixed: (sequences, tokens of all their contexts, increment, seconds).
        discarded: measurements of points that the engine did not run as asked.
    """

    prefill: list[tuple[int, int, float]]
    decode: list[tuple[int, int, float]]
    transfer: list[tuple[int, float]]
    reload: list[tuple[int, float]] = field(default_factory=list)
    mixed: list[tuple[int, int, int, float]] = field(default_factory=list)
    discarded: int = 0


Seen = dict[Measurement, list[float | None]]
"""The seconds of each measurement so far; None where the engine did not run the point as asked."""


def left_to_measure(grid: Grid, repeats: int, seen: Seen) -> int:
    """How often `measure` will measure, warming up included."""
    have = [len(seen.get(name, ())) for name in grid.measurements()]
    return sum(repeats - count + 1 for count in have if count < repeats)


async def measure(
    probe: Probe, grid: Grid, repeats: int, seed: int, on_measured: Callable[[], object], seen: Seen
) -> Points:
    """Measure every point until it has `repeats` measurements, after one pass to warm up; returns the medians.

    Args:
        on_measured: called after each measurement, and each that only warms up.
        seen: has the measurements of an earlier run, and gets those of this one.
    """
    calls: dict[str, Callable[..., Awaitable[float | None]]] = {
        "prefill": probe.prefill_s,
        "decode": probe.decode_step_s,
        "transfer": probe.transfer_s,
        "reload": probe.reload_s,
        "mixed": probe.mixed_pass_s,
    }
    found = {name: seen.setdefault(name, []) for name in grid.measurements()}
    rng, order = random.Random(seed), [name for name in found if len(found[name]) < repeats]
    for repeat in range(repeats + 1):
        rng.shuffle(order)
        for name in order:
            if repeat == 0 or len(found[name]) < repeat:
                seconds = await calls[name[0]](*name[1:])
                if repeat:
                    found[name].append(seconds)
                on_measured()
    return _medians(found)


def _medians(found: Seen) -> Points:
    points = Points(prefill=[], decode=[], transfer=[])
    for (curve, *point), measured in found.items():
        values = [seconds for seconds in measured if seconds is not None]
        points.discarded += len(measured) - len(values)
        if curve in ("decode", "mixed"):
            point[1] *= point[0]  # the context of the whole batch
        if values:
            getattr(points, curve).append((*point, statistics.median(values)))
    return points


# -- from measured points to a profile, with its error on held-out points

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
    attention_backend: str = "",
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
    if len(points.mixed) >= _FEWEST:
        mixed = {attention_backend: fit_mixed(points.mixed, PiecewiseModel(profile), Parallelism(tp))}
        workers = tuple(curves.model_copy(update={"mixed_passes": mixed}) for curves in profile.workers)
        profile = profile.model_copy(update={"workers": workers})
    if points.reload and kv_bytes_per_token:
        # The model has no fixed part. So long reloads count most, which are those that matter.
        tokens, seconds = (sum(column) for column in zip(*points.reload, strict=True))
        profile = profile.model_copy(update={"host_link_bytes_per_s": tokens * kv_bytes_per_token / tp / seconds})
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
            "host_link_bytes_per_s": measured.host_link_bytes_per_s or profile.host_link_bytes_per_s,
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
