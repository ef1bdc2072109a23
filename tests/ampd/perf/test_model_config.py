"""Dimensions from config.json files, and files that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from ampd.perf.model_shape import Experts, Weights
from ampd.perf.number_format import BF16
from ampd.perf.presets import model_shape

from .config_lab import MIXTRAL, write_config


def test_experts_of_their_own_width_tied_embeddings_and_head_dim(tmp_path: Path) -> None:
    config = MIXTRAL | {
        "num_experts": 128,
        "num_local_experts": None,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = model_shape(str(tmp_path))
    experts = shape.layers[0][0].experts
    assert experts == Experts(128, 8, (Weights(3 * 4096 * 768, BF16),))
    assert shape.kv_bytes_per_token == 2 * 32 * 8 * 64 * 2
    assert shape.is_tied


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": 512}, "qk_rope_head_dim must be a positive integer"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"num_experts_per_tok": None}, r"num_experts_per_tok must be from 1 to 8 \(given: None\)"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok must be from 1 to 8 \(given: 9\)"),
        ({"hidden_size": 10**400}, r"hidden_size must be a positive integer \(given: 10{29}\)"),
        ({"max_position_embeddings": 10**400}, r"max_position_embeddings is beyond all models \(given: 10{29}\)"),
        ({"num_attention_heads": 8192}, r"num_attention_heads \(8192\) exceeds hidden_size \(4096\)"),
        ({"model_type": "opt"}, "opt is no decoder with known matrices"),
        ({"is_encoder_decoder": True}, "is no decoder"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types has 2 entries for 32 layers"),
        ({"layer_types": 32 * ["magic"]}, r"layers of an unknown kind \(magic\)"),
        ({"attn_layer_period": 8, "mamba_d_state": 16}, r"unknown kind \(attn_layer_period, mamba_d_state\)"),
        ({"layer_types": 32 * ["mamba"]}, "no layer has KV"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is beyond all models"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method 'magic' is not known"),
        ({"quantization_config": {"quant_algo": "W1A1"}}, "quant_algo 'W1A1' is not known"),
    ],
)
def test_configs_that_cannot_be_used_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | change))
    with pytest.raises(UserError, match=words) as caught:
        model_shape(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a JSON document"),
        pytest.param("[" * 100_000, "not a JSON document", id="nested"),
        ("[]", "no object"),
    ],
)
def test_configs_that_are_no_json_object_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"config\.json: .*{words}") as caught:
        model_shape(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_experts_beside_the_chosen_ones_count_for_every_token(tmp_path: Path) -> None:
    change = {"n_shared_experts": 2, "moe_intermediate_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | change))
    shape = model_shape(str(tmp_path))
    without = model_shape(str(write_config(tmp_path / "without", change | {"n_shared_experts": 0})))
    assert shape.active_parameters - without.active_parameters == 32 * 3 * 4096 * 2000


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        ({"first_k_dense_replace": 3}, 3),
        ({"mlp_only_layers": [0, 7]}, 2),
        ({"decoder_sparse_step": 2}, 16),
        ({"moe_layer_freq": [0, 0] + 30 * [1]}, 2),
    ],
)
def test_layers_without_experts_have_a_plain_mlp(tmp_path: Path, change: dict[str, Any], dense: int) -> None:
    shape = model_shape(str(write_config(tmp_path, {"moe_intermediate_size": 1000} | change)))
    counts = {layer.experts is None: count for layer, count in shape.layers}
    assert counts == {True: dense, False: 32 - dense}
    plain = next(layer for layer, _ in shape.layers if layer.experts is None)
    assert sum(each.parameters for each in plain.every()) == 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"sliding_window": 4096}, 32),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),
        ({"sliding_window": 4096, "max_window_layers": 20}, 12),
        ({"sliding_window": 4096, "model_type": "gemma2"}, 16),
        ({"sliding_window": 4096, "layer_types": 8 * ["full_attention"] + 24 * ["sliding_attention"]}, 24),
        ({"attention_chunk_size": 8192, "model_type": "llama4_text"}, 24),
    ],
)
def test_layers_with_windows(tmp_path: Path, change: dict[str, Any], windows: int) -> None:
    shape = model_shape(str(write_config(tmp_path, change)))
    assert sum(count for each, count in shape.attention() if each.window) == windows


def test_only_windows_with_a_pool_of_their_own_free_memory(tmp_path: Path) -> None:
    """SGLang keeps all KV of Mistral and Gemma 3, and that of the last 128 tokens of gpt-oss."""
    change = {"sliding_window": 128, "layer_types": 16 * ["full_attention", "sliding_attention"]}
    kept = model_shape(str(write_config(tmp_path / "kept", change)))
    freed = model_shape(str(write_config(tmp_path / "freed", change | {"model_type": "gpt_oss"})))
    layer_bytes = 2 * 8 * 128 * 2
    assert (kept.kv_bytes_per_token, kept.sequence_bytes) == (32 * layer_bytes, 0)
    assert (freed.kv_bytes_per_token, freed.sequence_bytes) == (16 * layer_bytes, 16 * 128 * layer_bytes)
    assert freed.device_bytes_per_token(1) == pytest.approx(1.8 * 16 * layer_bytes)


GROUP = {"weights": {"num_bits": 4, "type": "int", "group_size": 32}, "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("quantization", "formats", "kv_bits"),
    [
        ({"quant_method": "fp8"}, "fp8 + 16-bit", 16),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0"]}, "fp8 + 16-bit", 16),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, "mxfp4 + 16-bit", 16),
        ({"quant_method": "awq", "bits": 4}, "int4 + 16-bit", 16),
        ({"quant_method": "gptq", "bits": 8}, "8-bit weights + 16-bit", 16),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": GROUP}, "ignore": ["re:.*self_attn.*"]},
            "int4 + 16-bit",
            16,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {}}},
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            "8-bit weights + 16-bit",
            8,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "nvfp4 + 16-bit", 8),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    f"model.layers.{index}.block_sparse_moe.experts": {"quant_algo": "NVFP4"} for index in range(32)
                },
            },
            "nvfp4 + 16-bit",
            16,
        ),
    ],
)
def test_formats_of_quantised_models(
    tmp_path: Path, quantization: dict[str, Any], formats: str, kv_bits: float
) -> None:
    shape = model_shape(str(write_config(tmp_path, {"quantization_config": quantization})))
    assert (shape.formats, shape.kv_bits) == (formats, kv_bits)
    assert shape.kv_bytes_per_token == 32 * 2 * 8 * 128 * kv_bits / 8
    assert model_shape(str(tmp_path), 8).kv_bytes_per_token == 32 * 2 * 8 * 128


def test_modules_that_stay_at_16_bits_do_so_in_their_layer_only(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn", "model.layers.1.*"]}
    shape = model_shape(str(write_config(tmp_path, {"quantization_config": quantization})))
    attention, experts, router = 4096 * 128 * (2 * 32 + 2 * 8), 8 * 3 * 4096 * 14336, 4096 * 8
    kept = {0: attention, 1: attention + experts}
    quantised = 32 * (attention + experts) - sum(kept.values())
    assert shape.weight_bytes == quantised + 2 * (sum(kept.values()) + 32 * router + 2 * 4096 * 32000)


def test_the_file_of_the_model_optimizer_counts(tmp_path: Path) -> None:
    write_config(tmp_path, {})
    text = json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})
    (tmp_path / "hf_quant_config.json").write_text(text)
    shape = model_shape(str(tmp_path))
    assert (shape.formats, shape.kv_bits) == ("fp8 + 16-bit", 8)


def test_degrees_divide_blocks_of_quantised_experts(tmp_path: Path) -> None:
    """Engines do not cut a block of weights with a common scale."""
    change = {"moe_intermediate_size": 1536, "num_attention_heads": 64}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    shape = model_shape(str(write_config(tmp_path, change | {"quantization_config": quantization})))
    assert [tp for tp in (1, 2, 4, 8) if shape.divides(tp)] == [1, 2, 4]
    assert model_shape(str(write_config(tmp_path, change))).divides(8)


def test_weights_are_16_bit_whatever_the_file_stores(tmp_path: Path) -> None:
    """Engines load 32-bit checkpoints as 16-bit values."""
    path = write_config(tmp_path, {"torch_dtype": "float32"})
    assert model_shape(str(path)).weight_bytes == model_shape("mixtral-8x7b").weight_bytes


@pytest.mark.parametrize(
    ("change", "is_tied"),
    [({}, False), ({"model_type": "gemma2"}, True), ({"model_type": "gemma2", "tie_word_embeddings": False}, False)],
)
def test_families_that_leave_out_tied_embeddings_are_tied(
    tmp_path: Path, change: dict[str, Any], is_tied: bool
) -> None:
    config = {key: value for key, value in MIXTRAL.items() if key != "tie_word_embeddings"} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_shape(str(tmp_path)).is_tied == is_tied


def test_the_text_part_of_a_larger_model_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1, "text_config": MIXTRAL}))
    assert model_shape(str(tmp_path)).parameters == model_shape("mixtral-8x7b").parameters
