"""Dimensions of a model from its Hugging Face `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from ampd.perf.model_shape import ModelShape

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_DEFAULT_CONTEXT = 32_768


def read_model_shape(path: Path) -> ModelShape:
    """Read a config.json, or that of a model folder.

    Sliding windows count as full attention; quantised weights count as 16-bit values.

    Raises:
        UserError: no such file, not a decoder that we can describe, or a field that is missing or wrong.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot read the model's configuration ({error.strerror})") from None
    except ValueError:
        raise UserError(f"{file}: not a JSON document") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: not a model's configuration: no object")
    name = path.resolve().name if path.is_dir() else file.resolve().parent.name
    return shape_of(config.get("text_config") or config, name, str(file))


def shape_of(config: dict[str, Any], name: str, where: str) -> ModelShape:
    """The shape that a configuration describes; `where` is how errors call it.

    Raises:
        UserError: as `read_model_shape`.
    """
    if config.get("kv_lora_rank"):
        raise UserError(f"{where}: latent attention (MLA) has another KV; no analytic model for it, measure a profile")
    hidden, heads = _number(config, "hidden_size", where), _number(config, "num_attention_heads", where)
    experts = _first(config, ("num_local_experts", "num_experts", "n_routed_experts")) or 1
    active = (_first(config, ("num_experts_per_tok", "num_experts_per_token")) or 1) if experts > 1 else 1
    intermediate = _number(config, "intermediate_size", where)
    if experts > 1:
        intermediate = _first(config, ("moe_intermediate_size",)) or intermediate
    return ModelShape(
        name=name,
        layers=_number(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=_first(config, ("num_key_value_heads",)) or heads,
        head_dim=_first(config, ("head_dim",)) or hidden // heads,
        intermediate=intermediate,
        vocabulary=_number(config, "vocab_size", where),
        max_context_tokens=_first(config, ("max_position_embeddings",)) or _DEFAULT_CONTEXT,
        experts=experts,
        active_experts=active,
        shared_intermediate=_first(config, ("shared_expert_intermediate_size",)) or 0,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        bytes_per_value=_BYTES.get(str(config.get("torch_dtype") or config.get("dtype")), 2),
    )


def _number(config: dict[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        given = "it is missing" if value is None else f"given: {value!r}"
        raise UserError(f"{where}: {key} must be a positive integer ({given}); is it a decoder's config.json?")
    return value


def _first(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
