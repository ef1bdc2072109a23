"""Check of the model folder: whether workers can serve it here, at the given degree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampd.cli.doctor.finding import Finding, Verdict
from ampd.cli.serve.settings import TINY
from ampd.errors import UserError
from ampd.model_folder import check_model_folder
from ampd.perf.memory import MEMORY_SHARE
from ampd.tiny_model import tiny_model_path
from workers.engines.sglang_limits import check_degree
from workers.kv.geometry import TRIED_DEGREES

PROG = "ampd doctor"
_GB = 1e9
_COMPLETE = "give a complete model folder: --model FOLDER"


@dataclass(frozen=True, slots=True)
class ModelReading:
    """A model folder.

    Attributes:
        problem: why it cannot be served; empty: it can.
        fix: what to do about the problem; empty: there is none.
        kv_pool: SGLang's class of the KV pool, derived from the configuration.
        weight_bytes: of the files with weights.
    """

    folder: str
    problem: str = ""
    fix: str = ""
    architecture: str = ""
    kv_pool: str = ""
    weight_bytes: int = 0


def read_model(model: str, tp: int, *, needs_weights: bool) -> ModelReading:
    """Read configuration, tokenizer and sizes of the weights.

    Args:
        model: a folder, or `tiny`.
        needs_weights: the engine computes.
    """
    try:
        folder = check_model_folder(tiny_model_path() if model == TINY else Path(model), PROG)
        check_degree(folder, tp, PROG)
    except UserError as error:
        problem, _, fix = str(error).removeprefix(f"{PROG}: ").partition("; ")
        return ModelReading(model, problem, fix or _COMPLETE)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = {**config, **(config.get("text_config") or {})}
        pool = kv_pool(text)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return ModelReading(model, f"{folder / 'config.json'} is not a model's configuration", _COMPLETE)
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    weight_bytes = sum(file.stat().st_size for file in files)
    problem = f"{folder} has no weights (*.safetensors)" if needs_weights and not weight_bytes else ""
    named = config.get("architectures")
    architecture = ", ".join(filter(None, map(str, named if isinstance(named, list) else ())))
    architecture = architecture or str(config.get("model_type") or "unknown architecture")
    fix = _COMPLETE if problem else ""
    return ModelReading(str(folder), problem, fix, architecture, pool, weight_bytes)


def kv_pool(config: Mapping[str, Any]) -> str:
    """SGLang's class of the KV pool for a configuration. What a worker reports at its start is exact."""
    if config.get("kv_lora_rank"):
        return "MLATokenToKVPool"
    layers = set(config.get("layer_types") or ())
    if "linear_attention" in layers or config.get("linear_num_key_heads") or config.get("full_attention_interval"):
        return "HybridLinearKVPool"
    if config.get("model_type") in ("gpt_oss", "gemma4", "gemma4_text"):
        return "SWAKVPool"
    return "MHATokenToKVPool"


def judge_model(reading: ModelReading, tp: int, rank_bytes: int, *, is_shared: bool) -> list[Finding]:
    """Whether the KV exchange was tried with this family, and whether the weights fit.

    Args:
        rank_bytes: memory of the device that one rank computes on.
        is_shared: all ranks of both workers compute on the same device.
    """
    if reading.problem:
        return [Finding("model", Verdict.WRONG, reading.problem, reading.fix)]
    found = (
        f"{reading.folder}: {reading.architecture}, {reading.kv_pool}, {reading.weight_bytes / _GB:.2f} GB of weights"
    )
    ranks = 2 * tp if is_shared else 1
    usable = MEMORY_SHARE.usable_share * rank_bytes / ranks
    if reading.weight_bytes / tp > usable:
        found += f"; {usable / _GB:.1f} GB are left for each rank"
        fix = "use a larger --tp, or more GPUs: both workers share one" if is_shared else "use a larger --tp"
        return [Finding("model", Verdict.WRONG, found, fix)]
    if tp not in TRIED_DEGREES.get(reading.kv_pool, ()):
        found += f"; never tried at --tp {tp}"
        fix = "try it with --worker-args '--allow-untested'; docs/models.md lists what was tried"
        return [Finding("model", Verdict.SLOW, found, fix)]
    return [Finding("model", Verdict.OK, found)]
