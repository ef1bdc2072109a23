"""Names everything on which the KV of an SGLang engine depends."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

from workers.kv.model_digest import model_digest

_NAMES = frozenset(
    {
        "model_path",
        "tokenizer_path",
        "revision",
        "load_format",
        "model_loader_extra_config",
        "custom_weight_loader",
        "model_impl",
        "json_model_override_args",
        "decrypted_config_file",
        "decrypted_draft_config_file",
        "dtype",
        "quantization",
        "quantization_param_path",
        "modelopt_quant",
        "modelopt_checkpoint_restore_path",
        "rl_quant_profile",
        "kv_cache_dtype",
        "page_size",
        "enable_lora",
        "lora_paths",
        "uno_lora_path",
        "kt_weight_path",
        "kt_method",
    }
)
_PREFIX = "speculative_"


def engine_fingerprint(server_args: Any) -> str:
    """A digest of the weights, the settings and the SGLang version of an engine.

    Args:
        server_args: SGLang's arguments as they are in effect, whichever flag set them. A path counts by its contents.
    """
    names = [name for name in ServerArgs.__struct_fields__ if name in _NAMES or name.startswith(_PREFIX)]
    settings = {name: _described(getattr(server_args, name, None)) for name in names}
    return sha256(json.dumps([__version__, settings], sort_keys=True).encode()).hexdigest()


def _described(value: Any) -> Any:
    """A value without what differs between equal workers: the place of files, and random names of adapters."""
    if hasattr(value, "lora_path"):
        return [value.lora_name, _described(value.lora_path)]
    if isinstance(value, dict):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    text = str(value)
    if os.path.exists(text):  # noqa: PTH110 - unlike Path.exists, it takes a text that is too long for a path
        return model_digest(Path(text))
    name, is_named, path = text.partition("=")
    return [name, _described(path)] if is_named and os.path.exists(path) else text  # noqa: PTH110 - as above
