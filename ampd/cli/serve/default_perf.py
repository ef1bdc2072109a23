"""The performance model of a graph whose user names none."""

from __future__ import annotations

from pathlib import Path

from ampd.cli.serve.devices import found_gpus
from ampd.cli.serve.settings import TINY
from ampd.errors import UserError
from ampd.perf.gpus import GPUS, preset_of
from ampd.perf.presets import load_performance_model

TINY_CPU = "tiny-cpu"
"""The profile of the tiny model, measured on a CPU."""


def default_perf(model: str) -> str:
    """`tiny-cpu` for the tiny model, else the analytic model of a folder on this machine's GPUs, as `FOLDER@GPU`.

    Args:
        model: a model folder, or `tiny`.

    Raises:
        UserError: the GPUs are of no known kind or of several, or the folder's model has no analytic one. The part
            behind the last `; ` says what to do.
    """
    if model == TINY:
        return TINY_CPU
    folder = Path(model).expanduser().resolve()
    names = _gpu_names()
    presets = {preset_of(name) for name in names}
    known = presets.pop() if len(presets) == 1 else None
    if known is None:
        raise UserError(
            f"--perf: the times of {folder.name} cannot be derived, because this machine has "
            f"{' and '.join(names) or 'no GPU'}, and not GPUs of one known kind ({', '.join(GPUS)}); name model and "
            f"GPU, as in --perf {folder}@h200 or --perf qwen3-32b@h20, or give --perf FILE, which `ampd profile` writes"
        )
    perf = f"{folder}@{known}"
    try:
        load_performance_model(perf)
    except UserError as error:
        raise UserError(
            f"--perf: {error}; give --perf FILE, which `ampd profile` writes, or name the nearest model, as in "
            f"--perf qwen3-32b@{known}"
        ) from None
    return perf


def _gpu_names() -> list[str]:
    try:
        return sorted({gpu.name for gpu in found_gpus()})
    except UserError:  # `ampd doctor` shows it
        return []
