"""Presets against published figures, config.json files, and refusals in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from ampd.perf.gpus import gpu
from ampd.perf.memory import MemoryShare, kv_capacity_tokens
from ampd.perf.presets import MODELS, analytic_model, model_shape

PUBLISHED = {
    "qwen3-32b": (32.8e9, 32.8e9, 262_144),
    "qwen3-0.6b": (0.6e9, 0.6e9, 114_688),
    "llama-3.1-70b": (70.6e9, 70.6e9, 327_680),
    "llama-3.1-8b": (8.03e9, 8.03e9, 131_072),
    "mixtral-8x7b": (46.7e9, 12.9e9, 131_072),
}
"""Parameters, active parameters (with both embeddings), KV bytes per token: from the model cards."""

MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_presets_have_the_published_sizes(name: str) -> None:
    shape, (parameters, active, kv_bytes) = MODELS[name], PUBLISHED[name]
    embeddings = shape.output_parameters * (1 if shape.is_tied else 2)
    assert shape.parameters == pytest.approx(parameters, rel=0.01)
    assert shape.active_parameters + embeddings == pytest.approx(active, rel=0.01)
    assert shape.kv_bytes_per_token == kv_bytes


def test_a_config_file_says_the_same_as_the_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    preset = MODELS["mixtral-8x7b"]
    for path in (tmp_path, tmp_path / "config.json"):
        shape = model_shape(str(path))
        assert shape.parameters == preset.parameters
        assert (shape.experts, shape.active_experts, shape.max_context_tokens) == (8, 2, 32768)
    assert (
        analytic_model(str(tmp_path), "h100").profile.workers == analytic_model("mixtral-8x7b", "h100").profile.workers
    )


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


def test_degrees_stay_within_a_server_and_count_once() -> None:
    model = analytic_model("llama-3.1-8b", "h100", degrees=(16, 2, 0, 2, 8))
    assert [theta.tp for theta in model.parallelisms] == [2, 8]
    for degrees in ((16, 32), (), (0, -1)):
        with pytest.raises(UserError, match="is within a server of 8 GPUs"):
            analytic_model("llama-3.1-8b", "h100", degrees=degrees)


def test_kv_heads_must_divide_or_be_replicated_evenly(tmp_path: Path) -> None:
    change = {"num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 128}
    model = analytic_model(str(write_config(tmp_path, change)), "b200")
    assert [theta.tp for theta in model.parallelisms] == [1, 2]


def write_config(folder: Path, change: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MIXTRAL | change))
    return folder


@pytest.mark.parametrize("name", ["/nonexist/config.json", "models/mine", "config.json.JSON"])
def test_what_looks_like_a_path_is_missed_as_a_file(name: str) -> None:
    with pytest.raises(UserError, match=f"no file at {name}; .* qwen3-32b"):
        model_shape(name)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"llama-3.1-70b, llama-3.1-8b, mixtral-8x7b, qwen3-0.6b, qwen3-32b"):
        analytic_model("gpt-5", "h20")
    with pytest.raises(UserError, match="a100, b200, h100, h20, h200, h800, l40s"):
        analytic_model("qwen3-32b", "tpu")


def test_degrees_that_do_not_fit_are_left_out_and_none_is_an_error(tmp_path: Path) -> None:
    assert [theta.tp for theta in analytic_model("llama-3.1-70b", "h100").parallelisms] == [2, 4, 8]
    assert [theta.tp for theta in analytic_model("qwen3-32b", "l40s").parallelisms] == [2, 4, 8]
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"num_local_experts": 512}))
    with pytest.raises(UserError, match=r"does not fit: its weights take \d+ GB, 8 x NVIDIA L40S leave \d+ GB"):
        analytic_model(str(tmp_path), "l40s")
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"num_attention_heads": 25, "head_dim": 128}))
    with pytest.raises(UserError, match="divides its 25 attention heads"):
        analytic_model(str(tmp_path), "h200", degrees=(2, 4, 8))


def test_kv_takes_what_the_weights_leave() -> None:
    shape, card = MODELS["llama-3.1-8b"], gpu("h100")
    whole = kv_capacity_tokens(shape, card, 1, MemoryShare(usable_share=1.0, reserve_bytes=0))
    assert whole * shape.kv_bytes_per_token == pytest.approx(card.memory_bytes - shape.weight_bytes, abs=200_000)
    two = kv_capacity_tokens(shape, card, 2, MemoryShare(usable_share=1.0, reserve_bytes=0))
    assert two * shape.kv_bytes_per_token == pytest.approx(2 * card.memory_bytes - shape.weight_bytes, abs=300_000)
