"""Tiny models of random weights, one per family of KV pools, for engines on a CPU.

Random weights often do not depend on one of the pools. The sizes here were chosen so that zeroed KV of each pool of a
model changes its greedy tokens; tests of a family check that as their control.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampd.tiny_model import TinyModel, make_tiny_model

FAMILIES = ("qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma_4", "qwen3_next")
"""Plain attention, with experts of two kinds, MLA, sliding windows with sinks and without, gated delta nets."""

LAYERS = 4
WINDOW_TOKENS = 64
_VOCABULARY = 768
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def make_family(directory: Path, family: str, kv_heads: int = 2, heads: int = 4) -> Path:
    """Write the model of a family in Hugging Face's layout, with the tokenizer of `ampd.tiny_model`.

    Args:
        directory: made if it is missing.
        kv_heads: a divisor of `heads`; MLA has none and ignores it.
        heads: of queries. The model can run at their divisors, with gated delta nets at those of their half.

    Returns:
        The directory.
    """
    import torch
    from transformers import AutoModelForCausalLM

    make, more = _CONFIGS[family]
    tiny = make_tiny_model(directory.parent / f"{directory.name}-tokenizer", TinyModel(vocab_size=_VOCABULARY))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        sizes = {**_SIZES, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        model = AutoModelForCausalLM.from_config(make(sizes)).float()
        _let_every_pool_count(model)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, directory / name)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **more(sizes)}, indent=2) + "\n")
    return directory


def _let_every_pool_count(model: Any) -> None:
    """Give sinks and the decay of states values at which old KV and old states reach the output."""
    for name, parameter in model.named_parameters():
        values = parameter.data
        if "sinks" in name:
            values.normal_(0, 1)
        elif name.endswith("A_log"):
            values.fill_(-5.0)  # the default forgets a state within a few tokens
        elif name.endswith("dt_bias"):
            values.zero_()


def _qwen3(sizes: dict[str, Any]) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**sizes)


def _qwen3_moe(sizes: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**sizes, **_EXPERTS)


def _mixtral(sizes: dict[str, Any]) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)


def _deepseek_v3(sizes: dict[str, Any]) -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **{**sizes, "num_key_value_heads": sizes["num_attention_heads"], "head_dim": 16},
        kv_lora_rank=64,
        q_lora_rank=48,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        moe_intermediate_size=64,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **_YARN},
    )


_YARN = {
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 1024,
}


def _gpt_oss(sizes: dict[str, Any]) -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **sizes,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW_TOKENS,
        layer_types=list(_ALTERNATING),
    )


def _gemma_4(sizes: dict[str, Any]) -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        **{**sizes, "initializer_range": 0.05},
        # The real model has other heads in full layers. Then this transformers refuses what SGLang asks of its config.
        global_head_dim=32,
        sliding_window=WINDOW_TOKENS,
        layer_types=list(_ALTERNATING),
        vocab_size_per_layer_input=_VOCABULARY,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    )


def _qwen3_next(sizes: dict[str, Any]) -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **sizes,
        **_EXPERTS,
        linear_num_value_heads=sizes["num_attention_heads"],
        linear_num_key_heads=sizes["num_attention_heads"] // 2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        shared_expert_intermediate_size=64,
    )


def _nothing(_sizes: dict[str, Any]) -> dict[str, Any]:
    return {}


def _of_deepseek(_sizes: dict[str, Any]) -> dict[str, Any]:
    """What SGLang reads from the config of the real model, and transformers does not write."""
    return {
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_scaling": {"type": "yarn", **_YARN},
        "rope_theta": 10000.0,
    }


def _of_gemma(sizes: dict[str, Any]) -> dict[str, Any]:
    return {"swa_num_key_value_heads": sizes["num_key_value_heads"], "swa_head_dim": 32, "swa_v_head_dim": 32}


def _of_qwen3_next(sizes: dict[str, Any]) -> dict[str, Any]:
    heads = sizes["num_attention_heads"]
    on_cpu = {"linear_num_value_heads_cpu": heads, "linear_num_key_heads_cpu": heads // 2}
    return {"full_attention_interval": LAYERS, **on_cpu}


_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "qwen3": (_qwen3, _nothing),
    "qwen3_moe": (_qwen3_moe, _nothing),
    "mixtral": (_mixtral, _nothing),
    "deepseek_v3": (_deepseek_v3, _of_deepseek),
    "gpt_oss": (_gpt_oss, _nothing),
    "gemma_4": (_gemma_4, _of_gemma),
    "qwen3_next": (_qwen3_next, _of_qwen3_next),
}
