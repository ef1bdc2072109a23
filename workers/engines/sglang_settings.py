"""Settings of the SGLang engine, and the arguments that SGLang gets from them.

What SGLang cannot run, or the KV exchange cannot follow, is refused in one line, before any process starts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from ampd.errors import UserError
from ampd.model_folder import check_model_folder
from ampd.perf.presets import DEGREES
from ampd.settings import Settings
from ampd.types import GIB
from workers.engines.base import EngineError
from workers.kv.shared import TRIED_PAGE_TOKENS, StoreMemory, default_size_bytes

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
    kv_checksums: Literal["off", "reads"] = Field(
        "reads",
        description="Pages that are verified by a checksum: off (none), reads (from other workers).",
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


def engine_arguments(settings: SglangSettings, *, on_gpu: bool, linker: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `sglang.Engine`: the settings, AMPD's linker, and what a machine without GPU needs.

    Args:
        linker: what `workers.kv.ranks.linker.KvLinker` gets as `extra_config`.
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
        "enable_mixed_chunk": True,
        # By itself a prefill that SGLang has begun takes every pass whole, and rounds that were handed over wait.
        "schedule_policy": "shortest-prefill-first",
        "log_level": "error",
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "KvLinker",
            "linker_module_path": "workers.kv.ranks.linker",
            "linker_extra_config": linker,
        },
    }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return {**arguments, **({} if on_gpu else _CPU_ARGUMENTS), **json.loads(settings.engine_args)}


def check_sglang(settings: SglangSettings, prog: str) -> None:
    """Refuse what SGLang cannot run, before any process is started.

    Raises:
        UserError: no model with weights in the folder, a degree that does not fit its heads, engine arguments that
            the KV exchange cannot follow, or a page size that was never tried. The line starts with `prog`.
    """
    arguments = json.loads(settings.engine_args)
    check_arguments(arguments, prog)
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


# -- what does not work


_DIVIDED = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
_REPLICATED = ("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
"""Heads in a model's config.json: each rank has its own part; there may be more ranks than heads of the second kind."""

_ONE_REPLICA = "start one worker per replica"
_LINKER = "it connects SGLang with the KV store of the worker"
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tp_size": ((), "the degree is --tp"),
    "nnodes": ((1,), "all ranks of a worker must be on one host, because they share its KV store"),
    "pp_size": ((1,), "pipeline stages do not agree on which KV was loaded; use --tp"),
    "dp_size": ((1,), f"data parallelism within a worker is not supported; {_ONE_REPLICA}"),
    "attn_dp_size": ((1,), f"attention data parallelism is not supported; {_ONE_REPLICA}"),
    "enable_dp_attention": ((False,), f"attention data parallelism is not supported; {_ONE_REPLICA}"),
    "attn_cp_size": ((1,), "context parallelism divides the KV of a page among ranks; use --tp"),
    "dcp_size": ((1,), "context parallelism divides the KV of a page among ranks; use --tp"),
    "enable_prefill_cp": ((False,), "context parallelism divides the KV of a page among ranks; use --tp"),
    "enable_kv_cache_sharding": ((False,), "a rank must hold all pages of its heads"),
    "speculative_algorithm": ((None,), "the KV of a draft model is not exchanged"),
    "kv_cache_dtype": (("auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3"), "its scales per block are not exchanged"),
    "enable_hierarchical_cache": ((False,), "the KV store of the worker takes its place"),
    "enable_lmcache": ((False,), "the KV store of the worker takes its place"),
    "enable_flexkv": ((False,), "the KV store of the worker takes its place"),
    "enable_session_radix_cache": ((False,), "the KV store keeps the sessions"),
    "dllm_algorithm": ((None,), "answers go on at another worker after their first token, not after a block"),
    "enable_hisparse": ((False,), "sparse KV is not exchanged"),
    "enable_unified_memory": ((False,), "KV in unified memory is not exchanged"),
    "enable_int8_mamba_checkpoint": ((False,), "quantised states are not exchanged"),
    "enable_linear_replayssm": ((False,), "states that are replayed are not exchanged"),
    "enable_mamba_cache_stochastic_rounding": ((False,), "states that are rounded by chance differ between workers"),
    "mamba_radix_cache_strategy": (("auto", "extra_buffer"), "states of other strategies were never exchanged"),
    "remote_instance_weight_loader_seed_instance_ip": ((None,), "workers cannot compare weights that have no files"),
    "enable_mixed_chunk": ((), "the worker chooses the passes that are mixed"),
    "disaggregation_mode": (("null",), "AMPD moves the KV itself"),
    "enable_unified_cache_external_linker": ((True,), _LINKER),
    "unified_cache_external_linker_backend": ((), _LINKER),
    "unified_cache_external_linker_config": ((), _LINKER),
}
"""SGLang's arguments that `--engine-args` may not set to any but these values, and why."""


def check_arguments(arguments: Mapping[str, Any], prog: str) -> None:
    """Refuse engine arguments that the KV exchange cannot follow.

    Args:
        arguments: of `--engine-args`, by SGLang's names.

    Raises:
        UserError: it names the argument and the reason.
    """
    for name, value in arguments.items():
        allowed, reason = _REFUSED.get(name, ((value,), ""))
        if value not in allowed:
            raise UserError(f"{prog}: --engine-args: {name}={json.dumps(value)} does not work here: {reason}")


def check_page_size(page_tokens: int, prog: str) -> None:
    """Refuse a page size with which the KV store was never tried.

    Raises:
        UserError: it names the sizes that were, and how to try this one.
    """
    if page_tokens not in TRIED_PAGE_TOKENS:
        sizes = ", ".join(map(str, TRIED_PAGE_TOKENS))
        raise UserError(
            f"{prog}: --page-size {page_tokens} was never tried with the KV store; use one of: {sizes}, or try it with "
            "--allow-untested"
        )


def check_degree(model: Path, tp: int, prog: str) -> None:
    """Refuse a degree that does not fit the heads of the model in this folder.

    Raises:
        UserError: it names the heads and the degrees that fit.
    """
    heads = _heads(model, prog)
    fitting = [degree for degree in DEGREES if all(_fits(name, count, degree) for name, count in heads.items())]
    if tp in fitting:
        return
    wrong = next((f"{name}={count}" for name, count in heads.items() if not _fits(name, count, tp)), "SGLang")
    degrees = ", ".join(map(str, fitting))
    reason = "is not a supported degree" if tp not in DEGREES else f"does not fit the model's {wrong}"
    raise UserError(f"{prog}: --tp {tp} {reason}; use one of: {degrees}")


def _fits(name: str, count: int, tp: int) -> bool:
    return count % tp == 0 or (name in _REPLICATED and tp % count == 0)


def _heads(model: Path, prog: str) -> dict[str, int]:
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = {**config, **(config.get("text_config") or {})}  # a multimodal model's language part
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"{prog}: --model: {path} is not a JSON object; copy the model's files again") from None
    heads = {name: config[name] for name in (*_DIVIDED, *_REPLICATED) if config.get(name)}
    for name, count in heads.items():
        if type(count) is not int or count < 1:
            raise UserError(f"{prog}: --model: {path}: {name} must be a whole number; copy the model's files again")
    return heads
