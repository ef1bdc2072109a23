"""Performance models imported from NVIDIA AIConfigurator: its measured operators, composed into whole passes.

AIConfigurator is an optional package and works without a network. We ask its compiled engine for prefills and decode
steps over a grid and fit our curves; transfers and memory come from our own presets, for it has no KV moves.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from ampd.perf.fit import fit_decode, fit_prefill
from ampd.perf.gpus import gpu
from ampd.perf.memory import MemoryShare, kv_capacity_tokens
from ampd.perf.model_shape import ModelShape
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import DEGREES, fitting_degrees, model_shape
from ampd.perf.profile import ParallelismCurves, PerformanceProfile, Provenance
from ampd.perf.roofline import Efficiency, transfer_curve

SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "a100": "a100_sxm", "l40s": "l40s", "b200": "b200_sxm"}
"""Our GPU presets that it has data for, by its names."""

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
_MS = 1e-3


def aiconfigurator_model(model: str, gpu_name: str, degrees: Sequence[int] = DEGREES) -> PiecewiseModel:
    """The performance model of a model on a GPU by AIConfigurator's data, for those of the degrees that fit.

    Raises:
        UserError: the package is missing, it has no data for the GPU, or it cannot describe the model.
    """
    handle_type = _engine_handle()
    shape, card = model_shape(model), gpu(gpu_name)
    system = SYSTEMS.get(gpu_name.lower())
    if system is None:
        raise UserError(f"AIConfigurator has no data for {card.name}; it has {', '.join(sorted(SYSTEMS))}")
    fitting = fitting_degrees(shape, card, degrees)
    workers = []
    with _config_folder(model) as folder:
        for tp in fitting:
            handle = _compiled(handle_type, folder, system, tp, shape)
            workers.append(_curves(handle, tp, kv_capacity_tokens(shape, card, tp, MemoryShare())))
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
        max_context_tokens=shape.max_context_tokens,
    )
    return PiecewiseModel(profile, f"{shape.name} on {card.name} (AIConfigurator)")


def _engine_handle() -> Any:
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError:
        raise UserError("AIConfigurator is not installed: pip install 'ampd[aiconfigurator]'") from None
    return EngineHandle


def _compiled(handle_type: Any, folder: Path, system: str, tp: int, shape: ModelShape) -> Any:
    experts = {"moe_tp_size": tp} if shape.experts > 1 else {}
    # It talks on stdout and through its logger about data that it borrows from other backends.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return handle_type.compile(str(folder), system, _BACKEND, tp_size=tp, **experts)
    except Exception as error:
        raise UserError(
            f"AIConfigurator cannot model {shape.name} on {system} at TP {tp}: {' '.join(str(error).split())[:200]}"
        ) from None


def _curves(handle: Any, tp: int, capacity_tokens: int) -> ParallelismCurves:
    prefill = [
        (hist, incr, _MS * handle.predict_prefill_latency(1, hist + incr, hist))
        for hist in _HISTORIES
        for incr in _INCREMENTS
    ]
    decode = [
        (batch, batch * context, _MS * handle.predict_decode_latency(batch, context))
        for batch in _BATCHES
        for context in _CONTEXTS
        if batch * context <= max(capacity_tokens, context)
    ]
    return ParallelismCurves(
        tp=tp, prefill=fit_prefill(prefill), decode=fit_decode(decode), kv_capacity_tokens=capacity_tokens
    )


@contextmanager
def _config_folder(model: str) -> Iterator[Path]:
    """A folder with the model's config.json: the user's own, or the one of the package."""
    packaged = _MODELS.get(model.lower())
    if packaged is None:
        path = Path(model).expanduser()
        yield path if path.is_dir() else path.parent
        return
    with tempfile.TemporaryDirectory(prefix="ampd-model-") as name:
        source = files("aiconfigurator_core") / "model_configs" / f"{packaged}_config.json"
        shutil.copy(str(source), Path(name) / "config.json")
        yield Path(name)
