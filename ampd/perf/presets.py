"""Performance models by name: shipped profiles, files, and the analytic one of a model on a GPU."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ampd.errors import UserError
from ampd.perf.model_shape import ModelShape, read_model_shape
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.profile import read_profile
from ampd.perf.roofline import MEMORY_SHARE, Gpu, analytic_profile, gpu, kv_capacity_tokens

DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees within a server of 8 GPUs."""

_DATE = datetime.date(2026, 11, 21)
"""Date of the last check of the presets; part of every profile made from them."""

MODELS: dict[str, ModelShape] = {
    "qwen3-32b": ModelShape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151_936, 40_960),
    "qwen3-0.6b": ModelShape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151_936, 40_960, is_tied=True),
    "llama-3.1-70b": ModelShape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128_256, 131_072),
    "llama-3.1-8b": ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128_256, 131_072),
    "mixtral-8x7b": ModelShape(
        "Mixtral-8x7B", 32, 4096, 32, 8, 128, 14336, 32_000, 32_768, experts=8, active_experts=2
    ),
}
"""From the models' published configurations."""


NAMES = "a shipped profile's name, a profile file, or MODEL@GPU, as in qwen3-32b@h20 or /models/Qwen3-8B@h200"
"""What `load_performance_model` takes, for the descriptions of flags."""


def load_performance_model(name: str | Path | None, backend: str | None = None) -> PiecewiseModel:
    """A model by the name of a shipped profile, by the path of a profile file, or as `MODEL@GPU`: the analytic one.

    Args:
        name: None: the user has named none, which is an error, because the times of another model mislead.
        backend: as in `PiecewiseModel`.

    Raises:
        UserError: no such name or file (the known names are listed), an invalid file, or an unknown model or GPU.
    """
    if name is None:
        raise UserError(f"--perf is missing: the times of the model are not known; give {NAMES}")
    path, text = Path(name), str(name)
    if text in profile_names():
        return PiecewiseModel(read_profile(_profiles_folder() / f"{text}.json"), text, backend)
    model, at, gpu_name = text.rpartition("@")
    if model and at and not path.is_file():
        analytic = analytic_model(model, gpu_name)
        return PiecewiseModel(analytic.profile, analytic.name, backend)
    if not path.is_file():
        raise UserError(f"no performance model {text!r}; give {NAMES}; shipped are: {', '.join(profile_names())}")
    return PiecewiseModel(read_profile(path), text, backend)


def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _profiles_folder().glob("*.json")))


def _profiles_folder() -> Path:
    return Path(str(files("ampd.perf"))) / "profiles"


def model_shape(name_or_path: str) -> ModelShape:
    """A model by the name of its preset, or by the path of its config.json (or of the folder that holds it).

    Raises:
        UserError: neither; the known names are listed.
    """
    if found := MODELS.get(name_or_path.lower()):
        return found
    path = Path(name_or_path).expanduser()
    if path.exists():
        return read_model_shape(path)
    wrong = f"no file at {path}" if _looks_like_a_path(name_or_path) else f"unknown model {name_or_path!r}"
    raise UserError(f"{wrong}; give the path of a config.json, or one of: {_known_models()}")


def _looks_like_a_path(text: str) -> bool:
    return "/" in text or os.sep in text or text.lower().endswith(".json")


def analytic_model(model: str, gpu_name: str, degrees: Sequence[int] = DEGREES) -> PiecewiseModel:
    """The roofline model of a model on a GPU, for the `degrees` that fit.

    Raises:
        UserError: an unknown model or GPU; no degree fits (the line says how much is missing).
    """
    shape, card = model_shape(model), gpu(gpu_name)
    fitting = fitting_degrees(shape, card, degrees)
    return PiecewiseModel(analytic_profile(shape, card, fitting, _DATE), f"{shape.name} on {card.name}")


def fitting_degrees(shape: ModelShape, card: Gpu, degrees: Sequence[int]) -> tuple[int, ...]:
    """The degrees within a server that divide the heads and leave room for KV beside the weights.

    KV heads are divided too, or, where there are fewer of them than GPUs, replicated evenly.

    Raises:
        UserError: none does.
    """
    within = [tp for tp in sorted(set(degrees)) if 1 <= tp <= max(DEGREES)]
    if not within:
        raise UserError(f"{shape.name}: no degree of {list(degrees)} is within a server of {max(DEGREES)} GPUs")
    dividing = [tp for tp in within if shape.heads % tp == 0 and _splits(shape.kv_heads, tp)]
    if not dividing:
        raise UserError(
            f"{shape.name}: no degree of {within} divides its {shape.heads} attention heads (KV: {shape.kv_heads})"
        )
    fitting = tuple(tp for tp in dividing if kv_capacity_tokens(shape, card, tp) > 0)
    if not fitting:
        most = max(dividing)
        room_bytes = most * (MEMORY_SHARE.usable_share * card.memory_bytes - MEMORY_SHARE.reserve_bytes)
        raise UserError(
            f"{shape.name} does not fit: its weights take {shape.weight_bytes / 1e9:.0f} GB, "
            f"{most} x {card.name} leave {room_bytes / 1e9:.0f} GB"
        )
    return fitting


def _splits(kv_heads: int, tp: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0


def _known_models() -> str:
    return ", ".join(sorted(MODELS))
