"""Settings of the SGLang engine, and the arguments that SGLang gets from them."""

from __future__ import annotations

import json
import logging
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from ampd.errors import UserError
from ampd.model_folder import check_model_folder
from ampd.settings import Settings
from ampd.types import GIB
from workers.engines.base import EngineError
from workers.engines.sglang_limits import check_arguments, check_degree, check_page_size
from workers.kv.store_memory import StoreMemory, default_size_bytes

log = logging.getLogger(__name__)


ENGINE_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "WARN",
    "UCX_LOG_LEVEL": "error",
    # Without it, one request whose logits are all infinite or NaN ends the engine.
    "SGLANG_SANITIZE_NAN_LOGITS": "1",
}
"""Variables of the engine's processes, unless the user's own environment sets them."""


class Device(StrEnum):
    """Where the engine computes."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


class SglangSettings(Settings):
    """What SGLang is started with."""

    model: Path = Field(description="Model folder (Hugging Face layout, with its tokenizer).")
    tp: int = Field(1, ge=1, description="Tensor-parallel degree: GPUs of this worker.")
    device: Device = Field(Device.AUTO, description="Where to compute: auto takes the GPU if there is one.")
    dtype: str = Field(
        "auto", description="Data type of weights and KV: auto (the model's own), float32, bfloat16, ..."
    )
    mem_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Part of the GPU's memory for weights and KV (without a GPU, of the machine's); "
        "default: SGLang's own choice, 0.2 without a GPU.",
    )
    max_total_tokens: int | None = Field(
        None, ge=1, description="KV memory in tokens; default: what fits on a GPU, 65536 on the CPU."
    )
    page_size: int = Field(16, ge=1, description="Tokens per KV page: the unit in which KV is kept and moved.")
    max_context_tokens: int | None = Field(
        None, ge=2, description="Longest context; default: what the model's config.json says."
    )
    kv_store_gib: float | None = Field(
        None, gt=0, description="Host memory for the KV of sessions; default: half of what the machine has free."
    )
    kv_checksums: Literal["off", "reads", "all"] = Field(
        "reads",
        description="Pages that are verified by a checksum: off (none), reads (from other workers), all "
        "(also loads from the own store, which stop the worker for up to a second per 20 GB).",
    )
    allow_untested: bool = Field(
        False,
        description="Run page sizes, degrees and KV types with which the KV store was never tried.",
    )
    engine_args: str = Field("{}", description="Further SGLang engine arguments, as a JSON object; they win.")

    @field_validator("engine_args")
    @classmethod
    def _is_object(cls, text: str) -> str:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object")
        return text


_CPU_TOKENS = 65536

_CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
}
_CPU_MEM_FRACTION = 0.2


def choose_gpu(device: Device, tp: int) -> bool:
    """Whether the engine computes on GPUs.

    Raises:
        EngineError: there are fewer than it needs.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is Device.CUDA and not gpus:
        raise EngineError("--device cuda: there is no usable GPU here (use --device cpu, or auto)")
    if not gpus or device is Device.CPU:
        return False
    if tp > gpus:
        raise EngineError(f"--tp {tp} needs {tp} GPUs, this worker sees {gpus}; see CUDA_VISIBLE_DEVICES")
    return True


def create_store(settings: SglangSettings) -> StoreMemory:
    """The memory of the KV store.

    Raises:
        EngineError: the machine has less memory.
    """
    given_gib = settings.kv_store_gib
    try:
        return StoreMemory.create(default_size_bytes(workers_here=1) if given_gib is None else int(given_gib * GIB))
    except OSError as error:
        raise EngineError(f"--kv-store-gib: {error.strerror}") from None


def report_page_size(settings: SglangSettings, page_tokens: int) -> None:
    """Log the page size in effect if it is not the one that was asked for: some attention backends choose their own."""
    if page_tokens != (asked := _asked_page_tokens(settings)):
        line = "SGLang runs pages of %d tokens instead of %s; start the coordinators with --kv-block-size %d"
        log.warning(line, page_tokens, asked, page_tokens)


def _asked_page_tokens(settings: SglangSettings) -> Any:
    return json.loads(settings.engine_args).get("page_size", settings.page_size)


def engine_arguments(
    settings: SglangSettings, *, on_gpu: bool, linker: dict[str, Any], shares_passes: bool = False
) -> dict[str, Any]:
    """Arguments of `sglang.Engine`: the settings, AMPD's linker, and what a machine without GPU needs.

    Args:
        linker: what `workers.kv.ranks.linker.KvLinker` gets as `extra_config`.
        shares_passes: as in `SlicingPolicy`.
    """
    model = str(settings.model)
    arguments: dict[str, Any] = {
        "model_path": model,
        "tokenizer_path": model,
        "dtype": settings.dtype,
        "tp_size": settings.tp,
        "page_size": settings.page_size,
        "context_length": settings.max_context_tokens,
        "max_total_tokens": settings.max_total_tokens if on_gpu else settings.max_total_tokens or _CPU_TOKENS,
        "mem_fraction_static": settings.mem_fraction if on_gpu else settings.mem_fraction or _CPU_MEM_FRACTION,
        "incremental_streaming_output": True,
        "stream_interval": 1,
        "enable_mixed_chunk": shares_passes,
        "log_level": "error",
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "KvLinker",
            "linker_module_path": "workers.kv.ranks.linker",
            "linker_extra_config": linker,
        },
    }
    if shares_passes:
        # By itself a prefill that SGLang has begun takes every pass whole, and rounds that were handed over wait.
        arguments["schedule_policy"] = "shortest-prefill-first"
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return {**arguments, **({} if on_gpu else _CPU_ARGUMENTS), **json.loads(settings.engine_args)}


def check_sglang(settings: SglangSettings, prog: str, *, shares_passes: bool = False) -> None:
    """Refuse what SGLang cannot run, before any process is started.

    Raises:
        UserError: no model with weights in the folder, a degree that does not fit its heads, engine arguments that
            the KV exchange cannot follow, or a page size that was never tried. The line starts with `prog`.
    """
    arguments = json.loads(settings.engine_args)
    check_arguments(arguments, prog, shares_passes=shares_passes)
    if not settings.allow_untested:
        check_page_size(_asked_page_tokens(settings), prog)
    model = check_model_folder(settings.model, prog)
    check_degree(model, settings.tp, prog)
    if not any(model.glob("*.safetensors")) and not any(model.glob("*.bin")):
        raise UserError(f"{prog}: --model: {model} has no weights (*.safetensors); copy the model's weights into it")


def check_ranks(settings: SglangSettings, prog: str) -> None:
    """Refuse several ranks without GPUs for them.

    Raises:
        UserError: the line starts with `prog`.
    """
    try:
        if settings.tp > 1 and not choose_gpu(settings.device, settings.tp):
            raise EngineError(f"--tp {settings.tp} needs GPUs; on a CPU an engine has one rank (--tp 1)")
    except EngineError as error:
        raise UserError(f"{prog}: {error}") from None
