"""Performance models by name: shipped profiles, files, and the analytic one of a model on a GPU."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ampd.errors import UserError, did_you_mean
from ampd.perf.gpus import Gpu, gpu
from ampd.perf.model_shape import ModelShape, read_model_shape, shape_of
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.profile import read_profile
from ampd.perf.roofline import MEMORY_SHARE, analytic_profile, kv_capacity_tokens

DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees within a server of 8 GPUs."""

_DATE = datetime.date(2026, 11, 28)
"""Date of the last check of the presets; part of every profile made from them."""

MODELS: dict[str, dict[str, Any]] = json.loads((files("ampd.perf") / "models.json").read_text("utf-8"))
"""Each with its name and the sizes of its published config.json."""


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
        shipped = ", ".join(profile_names()) + did_you_mean(text, profile_names())
        raise UserError(f"no performance model {text!r}; give {NAMES}; shipped are: {shipped}")
    return PiecewiseModel(read_profile(path), text, backend)


def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _profiles_folder().glob("*.json")))


def _profiles_folder() -> Path:
    return Path(str(files("ampd.perf"))) / "profiles"


def model_shape(name_or_path: str, kv_bits: float = 0) -> ModelShape:
    """A model by the name of its preset, or by the path of its config.json (or of the folder that holds it).

    Args:
        kv_bits: of a value of KV; 0: as the model's configuration says.

    Raises:
        UserError: neither; the known names are listed.
    """
    if found := MODELS.get(name_or_path.lower()):
        return shape_of(found["config"], found["name"], name_or_path, kv_bits)
    path = Path(name_or_path).expanduser()
    if path.exists():
        return read_model_shape(path, kv_bits)
    known = ", ".join(sorted(MODELS)) + did_you_mean(name_or_path, MODELS)
    wrong = f"no file at {path}" if _looks_like_a_path(name_or_path) else f"unknown model {name_or_path!r}"
    raise UserError(f"{wrong}; give the path of a config.json, or one of: {known}")


def _looks_like_a_path(text: str) -> bool:
    return "/" in text or os.sep in text or text.lower().endswith(".json")


def analytic_model(model: str, gpu_name: str, degrees: Sequence[int] = DEGREES, kv_bits: float = 0) -> PiecewiseModel:
    """The roofline model of a model on a GPU, for the `degrees` that fit. `kv_bits`: as in `model_shape`.

    Raises:
        UserError: an unknown model or GPU; no degree fits (the line says how much is missing).
    """
    shape, card = model_shape(model, kv_bits), gpu(gpu_name)
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
    dividing = [tp for tp in within if shape.divides(tp)]
    if not dividing:
        raise UserError(f"{shape.name}: no degree of {within} divides its heads")
    fitting = tuple(tp for tp in dividing if kv_capacity_tokens(shape, card, tp) > 0)
    if not fitting:
        most = max(dividing)
        room_bytes = most * (MEMORY_SHARE.usable_share * card.memory_bytes - MEMORY_SHARE.reserve_bytes)
        raise UserError(
            f"{shape.name} does not fit: its weights take {shape.weight_bytes / 1e9:.0f} GB, "
            f"{most} x {card.name} leave {room_bytes / 1e9:.0f} GB"
        )
    return fitting
