"""What SGLang cannot run, or the KV exchange cannot follow. Each refusal is one line, before any process starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from ampd.perf.presets import DEGREES
from workers.kv.geometry import TRIED_PAGE_TOKENS

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
    "enable_mixed_chunk": ((), "the slicing policy says it, as in --slicing 'slack(mixes=true)'"),
    "disaggregation_mode": (("null",), "AMPD moves the KV itself"),
    "enable_unified_cache_external_linker": ((True,), _LINKER),
    "unified_cache_external_linker_backend": ((), _LINKER),
    "unified_cache_external_linker_config": ((), _LINKER),
}
"""SGLang's arguments that `--engine-args` may not set to any but these values, and why."""


def check_arguments(arguments: Mapping[str, Any], prog: str, *, shares_passes: bool = False) -> None:
    """Refuse engine arguments that the KV exchange cannot follow.

    Args:
        arguments: of `--engine-args`, by SGLang's names.
        shares_passes: as in `SlicingPolicy`.

    Raises:
        UserError: it names the argument and the reason.
    """
    for name, value in arguments.items():
        allowed, reason = _REFUSED.get(name, ((value,), ""))
        if value not in allowed:
            raise UserError(f"{prog}: --engine-args: {name}={json.dumps(value)} does not work here: {reason}")
    chunk = arguments.get("chunked_prefill_size")
    if shares_passes and isinstance(chunk, int) and chunk <= 0:
        raise UserError(
            f"{prog}: --engine-args: chunked_prefill_size={chunk} does not work with this slicing policy, whose "
            "prefills share their passes with the decode batch: SGLang shares passes only where it may cut prefills"
        )


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
