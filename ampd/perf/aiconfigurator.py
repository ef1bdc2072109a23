"""Performance models imported from NVIDIA AIConfigurator: its measured operators, composed into whole passes.

AIConfigurator is an optional package and works without a network. We ask its compiled engine for prefills and decode
steps over a grid and fit our curves. Transfers and memory come from our own presets because it models no KV moves.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from ampd.errors import UserError, one_line_of
from ampd.perf.fit import DecodePoint, PrefillPoint, fit_decode, fit_prefill
from ampd.perf.model_shape import ModelShape
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import DEGREES, fitting_degrees, model_shape
from ampd.perf.profile import ParallelismCurves, PerformanceProfile, Provenance
from ampd.perf.roofline import CALCULATED_PASSES, HOST_LINK_SHARE, Efficiency, gpu, kv_capacity_tokens, transfer_curve
from ampd.types import Parallelism

SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "a100": "a100_sxm", "l40s": "l40s", "b200": "b200_sxm"}
"""Our GPU presets that AIConfigurator has data for, with its names."""

_MODELS = {
    "qwen3-32b": "Qwen--Qwen3-32B",
    "qwen3-0.6b": "Qwen--Qwen3-0.6B",
    "llama-3.1-70b": "meta-llama--Meta-Llama-3.1-70B",
    "llama-3.1-8b": "meta-llama--Meta-Llama-3.1-8B",
    "mixtral-8x7b": "mistralai--Mixtral-8x7B-v0.1",
}
"""Configurations that come with the package."""

_BACKEND = "sglang"
_HISTORIES = (0, 1024, 4096, 16_384)
_INCREMENTS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (256, 1024, 4096, 16_384)
_HELD_PREFILLS = tuple((hist, incr) for hist in (0, 700, 10_000) for incr in (24, 200, 700, 3000))
_HELD_DECODES = tuple((batch, context) for batch in (1, 12, 48) for context in (500, 2500, 6000))
"""Points between those of the grid. The fit does not use them; its error is measured on them."""

_MS = 1e-3


def aiconfigurator_model(model: str, gpu_name: str, degrees: Sequence[int] = DEGREES) -> PiecewiseModel:
    """The performance model of a model on a GPU from AIConfigurator's data, for the degrees that fit.

    Raises:
        UserError: the package is missing, it has no data for the GPU, or it cannot describe the model.
    """
    handle_type = _engine_handle()
    shape, card = model_shape(model), gpu(gpu_name)
    system = SYSTEMS.get(gpu_name.lower())
    if system is None:
        raise UserError(f"AIConfigurator has no data for {card.name}; it has {', '.join(sorted(SYSTEMS))}")
    fitting = fitting_degrees(shape, card, degrees)
    workers, held = [], []
    with _config_folder(model) as folder:
        for tp in fitting:
            with _one_line_errors(f"{shape.name} on {system} at TP {tp}"):
                handle = _compiled(handle_type, folder, system, tp, shape)
                capacity_tokens = kv_capacity_tokens(shape, card, tp)
                curves = _curves(handle, tp, capacity_tokens)
                workers.append(
                    curves.model_copy(update={"kv_shards": shape.kv_shards(tp), "mixed_passes": CALCULATED_PASSES})
                )
                held.append((tp, _prefills(handle, _HELD_PREFILLS), _decodes(handle, _HELD_DECODES, capacity_tokens)))
    name = f"{shape.name} on {card.name} (AIConfigurator)"
    profile = PerformanceProfile(
        provenance=Provenance(
            kind="analytic",
            source=f"AIConfigurator {version('aiconfigurator')}, system {system}, backend {_BACKEND}",
            model=f"{shape.name}, 16-bit",
            gpu=card.name,
            date=datetime.date.today(),
            method="Prefill and decode latencies of its compiled engine over a grid, fitted; operators are measured by "
            "its authors, their composition is modelled. KV moves and memory are ours, from published figures.",
            assumptions={"network_share": Efficiency().network_share},
        ),
        workers=tuple(workers),
        kv_transfers=tuple(transfer_curve(shape, card, a, b, Efficiency()) for a in fitting for b in fitting),
        kv_bytes_per_token=shape.kv_bytes_per_token,
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


def _compiled(handle_type: Any, folder: Path, system: str, tp: int, shape: ModelShape) -> Any:
    experts = {"moe_tp_size": tp} if shape.experts > 1 else {}
    return handle_type.compile(str(folder), system, _BACKEND, tp_size=tp, **experts)


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


def _curves(handle: Any, tp: int, capacity_tokens: int) -> ParallelismCurves:
    prefill = _prefills(handle, ((hist, incr) for hist in _HISTORIES for incr in _INCREMENTS))
    decode = _decodes(handle, ((batch, context) for batch in _BATCHES for context in _CONTEXTS), capacity_tokens)
    return ParallelismCurves(
        tp=tp, prefill=fit_prefill(prefill), decode=fit_decode(decode), kv_capacity_tokens=capacity_tokens
    )


def _prefills(handle: Any, grid: Iterable[tuple[int, int]]) -> list[PrefillPoint]:
    """Points over (history, new tokens). AIConfigurator's `isl` is the sum of both."""
    return [(hist, incr, _MS * handle.predict_prefill_latency(1, hist + incr, hist)) for hist, incr in grid]


def _decodes(handle: Any, grid: Iterable[tuple[int, int]], capacity_tokens: int) -> list[DecodePoint]:
    """Points over (sequences, context of each) as far as the KV fits."""
    return [
        (batch, batch * context, _MS * handle.predict_decode_latency(batch, context))
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
    """A folder with the model's config.json: the user's own, or the one of the package.

    It is a copy because the package reads only this file name, and without quantisation: our weights and KV are 16-bit.
    """
    if packaged := _MODELS.get(model.lower()):
        source = Path(str(files("aiconfigurator_core"))) / "model_configs" / f"{packaged}_config.json"
    else:
        path = Path(model).expanduser()
        source = path / "config.json" if path.is_dir() else path
    config = json.loads(source.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    with tempfile.TemporaryDirectory(prefix="ampd-model-") as name:
        (Path(name) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(name)
