"""Fits the curves of a profile to points: non-negative least squares on relative errors.

The points are measured (`ampd profile`), or come from AIConfigurator. A segment's costs are linear, so the fit is exact
for given breakpoints. Breakpoints are added one at a time where they reduce the error most, as long as the Bayesian
information criterion improves. Coefficients are never negative, so that predicted times never fall when the amount of
work grows.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from ampd.errors import UserError, one_line_of
from ampd.perf.gpus import HOST_LINK_SHARE, gpu
from ampd.perf.model import PerformanceModel
from ampd.perf.model_shape import QUANTIZATION_FILE, ModelShape
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import DEGREES, MODELS, fitting_degrees, model_shape
from ampd.perf.profile import (
    DecodeCurve,
    MixedPassCosts,
    ParallelismCurves,
    PerformanceProfile,
    Piece,
    PrefillCurve,
    PrefillSegment,
    Provenance,
    TransferCurve,
)
from ampd.perf.roofline import CALCULATED_PASSES, Efficiency, kv_capacity_tokens, transfer_curve
from ampd.types import Parallelism

PrefillPoint = tuple[int, int, float]
"""(history tokens, new tokens, seconds)."""
DecodePoint = tuple[int, int, float]
"""(sequences, tokens of context of all of them, seconds of a step)."""
MixedPoint = tuple[int, int, int, float]
"""(sequences, tokens of context of all of them, new tokens of a prefill, seconds of a pass over all)."""
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


def fit_mixed(points: Sequence[MixedPoint], model: PerformanceModel, parallelism: Parallelism) -> MixedPassCosts:
    """What mixed passes gain, by the other times of `model`."""
    apart_s, most_s, contexts, seconds = [], [], [], []
    for batch, context_tokens, incr_tokens, pass_s in points:
        step_s = model.decode_step_s(batch, context_tokens, parallelism)
        two_s = model.prefill_s(0, incr_tokens, parallelism) + step_s
        joined_s = model.prefill_s(0, incr_tokens + batch, parallelism) + step_s
        most_s.append(two_s - joined_s + model.decode_step_s(batch, 0, parallelism))
        apart_s.append(two_s)
        contexts.append(context_tokens)
        seconds.append(pass_s)
    design = np.column_stack([-np.asarray(most_s), np.asarray(contexts, dtype=float)])
    weights = 1.0 / np.asarray(seconds)
    (saved, context_s), _ = nnls(design * weights[:, None], (np.asarray(seconds) - np.asarray(apart_s)) * weights)
    return MixedPassCosts(saved=min(float(saved), 1.0), context_s_per_token=float(context_s))


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


# -- Performance models imported from NVIDIA AIConfigurator: its measured operators, composed into whole passes
#
# AIConfigurator is an optional package and works without a network. We ask its compiled engine for prefills and decode
# steps over a grid and fit our curves. Transfers and memory come from our own presets because it models no KV moves.

SYSTEMS = {
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "a100": "a100_sxm",
    "l40s": "l40s",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
}
"""Our GPU presets that AIConfigurator has data for, with its names."""

_BACKEND = "sglang"
_HISTORIES = (0, 1024, 4096, 16_384)
_INCREMENTS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (256, 1024, 4096, 16_384)
_HELD_PREFILLS = tuple((hist, incr) for hist in (0, 700, 10_000) for incr in (24, 200, 700, 3000))
_HELD_DECODES = tuple((batch, context) for batch in (1, 12, 48) for context in (500, 2500, 6000))
"""Points between those of the grid. The fit does not use them; its error is measured on them."""

_MS = 1e-3


def aiconfigurator_model(
    model: str, gpu_name: str, degrees: Sequence[int] = DEGREES, kv_bits: float = 0
) -> PiecewiseModel:
    """The performance model of a model on a GPU from AIConfigurator's data, for the degrees that fit.

    Args:
        kv_bits: of a value of KV; 0: as the model's configuration says.

    Raises:
        UserError: the package is missing, it has no data for the GPU, or it cannot describe the model.
    """
    shape, card = model_shape(model, kv_bits), gpu(gpu_name)
    system = _system(gpu_name)
    fitting = fitting_degrees(shape, card, degrees)
    workers, held = [], []
    for tp in fitting:
        with measured_engine(model, shape, gpu_name, tp) as engine:
            capacity_tokens = kv_capacity_tokens(shape, card, tp)
            curves = _curves(engine, tp, capacity_tokens)
            workers.append(
                curves.model_copy(update={"kv_shards": shape.kv_shards(tp), "mixed_passes": CALCULATED_PASSES})
            )
            held.append((tp, _prefills(engine, _HELD_PREFILLS), _decodes(engine, _HELD_DECODES, capacity_tokens)))
    name = f"{shape.name} on {card.name} (AIConfigurator)"
    profile = PerformanceProfile(
        provenance=Provenance(
            kind="analytic",
            source=f"AIConfigurator {version('aiconfigurator')}, system {system}, backend {_BACKEND}",
            model=f"{shape.name}, {shape.formats}",
            gpu=card.name,
            date=datetime.date.today(),
            method="Prefill and decode latencies of its compiled engine over a grid, fitted; operators are measured by "
            "its authors, their composition is modelled. KV moves and memory are ours, from published figures.",
            assumptions={"network_share": Efficiency().network_share},
        ),
        workers=tuple(workers),
        kv_transfers=tuple(transfer_curve(shape, card, a, b, Efficiency()) for a in fitting for b in fitting),
        kv_bytes_per_token=round(shape.kv_bytes_per_token),
        host_link_bytes_per_s=card.host_bytes_per_s * HOST_LINK_SHARE,
        max_context_tokens=shape.max_context_tokens,
    )
    errors = _errors(PiecewiseModel(profile), held)
    provenance = profile.provenance.model_copy(update={"fit_error": errors})
    return PiecewiseModel(profile.model_copy(update={"provenance": provenance}), name)


def _engine_handle() -> Any:
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError:
        raise UserError(
            "AIConfigurator is not installed: uv pip install --editable '.[aiconfigurator]' in AMPD's repository"
        ) from None
    return EngineHandle


class Engine:
    """The engine of the package for a model at one degree. Times in seconds."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def prefill_s(self, hist: int, incr: int) -> float:
        # AIConfigurator's `isl` is the sum of both.
        return float(_MS * self._handle.predict_prefill_latency(1, hist + incr, hist))

    def decode_step_s(self, batch: int, context: int) -> float:
        """`context`: tokens of each sequence."""
        return float(_MS * self._handle.predict_decode_latency(batch, context))


@contextmanager
def measured_engine(model: str, shape: ModelShape, gpu_name: str, tp: int) -> Iterator[Engine]:
    """The package's engine of a model; while it is in use, all errors of the package are one line.

    Raises:
        UserError: the package is missing, it has no data for the GPU, or it cannot describe the model.
    """
    handle_type, system = _engine_handle(), _system(gpu_name)
    experts = {"moe_tp_size": tp} if shape.has_experts else {}
    kv = "fp8" if shape.kv_bits == 8 else "bfloat16"
    with _config_folder(model) as folder, _one_line_errors(f"{shape.name} on {system} at TP {tp}"):
        yield Engine(
            handle_type.compile(
                str(folder), system, _BACKEND, tp_size=tp, kvcache_quant_mode=kv, fmha_quant_mode="bfloat16", **experts
            )
        )


def _system(gpu_name: str) -> str:
    if found := SYSTEMS.get(gpu_name.lower()):
        return found
    raise UserError(f"AIConfigurator has no data for {gpu(gpu_name).name}; it has {', '.join(sorted(SYSTEMS))}")


@contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Silence the package, and turn all of its errors into one line."""
    # It prints and logs messages about data that it takes from other backends.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except Exception as error:
        raise UserError(f"AIConfigurator cannot model {what}: {one_line_of(error)[:200]}") from None


def _curves(engine: Engine, tp: int, capacity_tokens: int) -> ParallelismCurves:
    prefill = _prefills(engine, ((hist, incr) for hist in _HISTORIES for incr in _INCREMENTS))
    decode = _decodes(engine, ((batch, context) for batch in _BATCHES for context in _CONTEXTS), capacity_tokens)
    return ParallelismCurves(
        tp=tp, prefill=fit_prefill(prefill), decode=fit_decode(decode), kv_capacity_tokens=capacity_tokens
    )


def _prefills(engine: Engine, grid: Iterable[tuple[int, int]]) -> list[PrefillPoint]:
    """Points over (history, new tokens)."""
    return [(hist, incr, engine.prefill_s(hist, incr)) for hist, incr in grid]


def _decodes(engine: Engine, grid: Iterable[tuple[int, int]], capacity_tokens: int) -> list[DecodePoint]:
    """Points over (sequences, context of each) as far as the KV fits."""
    return [
        (batch, batch * context, engine.decode_step_s(batch, context))
        for batch, context in grid
        if batch * context <= max(capacity_tokens, context)
    ]


def _errors(
    model: PiecewiseModel, held: Iterable[tuple[int, list[PrefillPoint], list[DecodePoint]]]
) -> dict[str, float]:
    """Mean and largest relative error over all degrees, by curve; three digits."""
    prefill, decode = [], []
    for tp, prefills, decodes in held:
        theta = Parallelism(tp)
        prefill += [abs(model.prefill_s(hist, incr, theta) / seconds - 1) for hist, incr, seconds in prefills]
        decode += [abs(model.decode_step_s(batch, tokens, theta) / seconds - 1) for batch, tokens, seconds in decodes]
    curves = {"prefill": prefill, "decode": decode}
    means = {f"{curve}_mean": float(f"{sum(errors) / len(errors):.3g}") for curve, errors in curves.items()}
    return means | {f"{curve}_max": float(f"{max(errors):.3g}") for curve, errors in curves.items()}


@contextmanager
def _config_folder(model: str) -> Iterator[Path]:
    """A folder with the model's config.json. It is a copy because the package reads only this file name."""
    if preset := MODELS.get(model.lower()):
        config, quantization = preset["config"], None
    else:
        path = Path(model).expanduser()
        source = path / "config.json" if path.is_dir() else path
        config, quantization = json.loads(source.read_text(encoding="utf-8")), source.with_name(QUANTIZATION_FILE)
    with tempfile.TemporaryDirectory(prefix="ampd-model-") as name:
        (Path(name) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if quantization is not None and quantization.is_file():
            shutil.copy(quantization, name)
        yield Path(name)
