"""Checks of the model folder and of the performance model: whether workers can serve it here, at the given degree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampd.cli.doctor.finding import SERVE, Finding, Verdict
from ampd.cli.serve.default_perf import default_perf
from ampd.cli.serve.devices import FoundGpu
from ampd.cli.serve.settings import TINY
from ampd.errors import UserError
from ampd.model_folder import check_model_folder
from ampd.perf.memory import MEMORY_SHARE
from ampd.perf.presets import load_performance_model
from ampd.tiny_model import tiny_model_path
from ampd.types import Parallelism
from workers.engines.sglang_settings import check_degree
from workers.kv.geometry import TRIED_DEGREES

_GB, _MIB = 1e9, 1 << 20


@dataclass(frozen=True, slots=True)
class ModelReading:
    """A model folder.

    Attributes:
        kv_pool: SGLang's class of the KV pool, derived from the configuration.
        weight_bytes: of the files with weights; 0: there are none.
    """

    folder: str
    architecture: str
    kv_pool: str
    weight_bytes: int


def read_model(model: str, tp: int) -> ModelReading:
    """Read configuration, tokenizer and sizes of the weights.

    Args:
        model: a folder, or `tiny`.

    Raises:
        UserError: workers cannot read it, or not at this degree.
    """
    folder = check_model_folder(tiny_model_path() if model == TINY else Path(model), SERVE)
    check_degree(folder, tp, SERVE)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        pool = kv_pool({**config, **(config.get("text_config") or {})})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{folder / 'config.json'} is not a model's configuration; copy the model's files again"
        ) from None
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    named = config.get("architectures")
    architecture = ", ".join(filter(None, map(str, named if isinstance(named, list) else ())))
    architecture = architecture or str(config.get("model_type") or "unknown architecture")
    return ModelReading(str(folder), architecture, pool, sum(file.stat().st_size for file in files))


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


def judge_model(reading: ModelReading, tp: int, gpus: Sequence[FoundGpu], host_bytes: int) -> Finding:
    """Whether the weights fit beside some KV, and whether the KV exchange was tried with this family.

    Args:
        host_bytes: memory that is available; all ranks of both workers compute in it if there are no GPUs.
    """
    name, gigabytes = "model", reading.weight_bytes / _GB
    found = f"{reading.folder}: {reading.architecture}, {reading.kv_pool}, {gigabytes:.2f} GB of weights"
    if not reading.weight_bytes:
        fix = "give a complete model folder: --model FOLDER"
        return Finding(name, Verdict.WRONG, f"{reading.folder} has no weights (*.safetensors)", fix)
    free_bytes = min((_MIB * (gpu.memory_mib - gpu.used_mib) for gpu in gpus), default=host_bytes)
    free_gb = MEMORY_SHARE.usable_share * free_bytes / _GB
    worker_gb = gigabytes / tp if gpus else gigabytes
    found += f", {free_gb:.1f} GB for weights and KV {'on each GPU' if gpus else 'in the memory'}"
    if worker_gb > free_gb:
        fix = "use a larger --tp, or end other programs on the GPUs (nvidia-smi lists them)"
        return Finding(name, Verdict.WRONG, found, fix if gpus else "free memory, or raise the container's limit")
    if len(gpus) < 2 and 2 * worker_gb > free_gb:
        fix = "serve with one worker (--prefill 0 --decode 1), or with more GPUs"
        return Finding(name, Verdict.WARNING, f"{found}: too little for two workers", fix)
    if tp not in TRIED_DEGREES.get(reading.kv_pool, ()):
        fix = "try it with --worker-args '--allow-untested'; docs/models.md lists what was tried"
        return Finding(name, Verdict.WARNING, f"{found}; the KV store was never tried with it at --tp {tp}", fix)
    return Finding(name, Verdict.OK, found)


def check_performance_model(perf: str | None, model: str, tp: int) -> Finding:
    """Whether the times of the model are known: by `perf`, else by the performance model that `ampd serve` takes."""
    times, degree = load_performance_model(perf or default_perf(model)), Parallelism(tp)
    times.require([degree], [degree])
    capacity = times.kv_capacity_tokens(degree)
    found = f"{times.name}, --tp {tp}" + (f": room for KV of {capacity} tokens in a worker" if capacity else "")
    return Finding("performance model", Verdict.OK, found)
