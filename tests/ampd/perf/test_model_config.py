"""Dimensions from config.json files, and files that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from ampd.perf.presets import MODELS, model_shape

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
    assert (shape.experts, shape.active_experts, shape.intermediate) == (128, 8, 768)
    assert shape.kv_bytes_per_token == 2 * 32 * 8 * 64 * 2
    assert shape.is_tied


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"num_experts_per_tok": None}, r"num_experts_per_tok must be from 1 to 8 \(given: None\)"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok must be from 1 to 8 \(given: 9\)"),
        ({"hidden_size": 10**400}, r"hidden_size must be a positive integer \(given: 10{29}\)"),
        ({"max_position_embeddings": 10**400}, r"max_position_embeddings is beyond all models \(given: 10{29}\)"),
        ({"num_attention_heads": 8192}, r"num_attention_heads \(8192\) exceeds hidden_size \(4096\)"),
        ({"model_type": "opt"}, "opt is no decoder with gated MLPs"),
        ({"is_encoder_decoder": True}, "is no decoder"),
        ({"layer_types": ["linear_attention", "full_attention"]}, r"layers without KV \(linear_attention\)"),
        ({"attn_layer_period": 8, "mamba_d_state": 16}, r"layers without KV \(attn_layer_period, mamba_d_state\)"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step mixes dense layers and experts"),
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
    assert shape.shared_intermediate == 2000
    without = model_shape(str(write_config(tmp_path / "without", change | {"n_shared_experts": 0})))
    assert shape.active_parameters - without.active_parameters == 32 * 3 * 4096 * 2000


def test_weights_are_16_bit_whatever_the_file_stores(tmp_path: Path) -> None:
    """Engines load 32-bit checkpoints as 16-bit values."""
    path = write_config(tmp_path, {"torch_dtype": "float32"})
    assert model_shape(str(path)).weight_bytes == MODELS["mixtral-8x7b"].weight_bytes


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
    assert model_shape(str(tmp_path)).parameters == MODELS["mixtral-8x7b"].parameters
