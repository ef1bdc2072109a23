"""Presets against published figures, and refusals in one line."""

import json
from pathlib import Path

import pytest

from ampd.errors import UserError
from ampd.perf.presets import MODELS, analytic_model, load_performance_model, model_shape
from ampd.perf.roofline import MemoryShare, gpu, kv_capacity_tokens, preset_of

from .config_lab import MIXTRAL, write_config

PUBLISHED = {
    "qwen3-32b": (32.8e9, 32.8e9, 262_144),
    "qwen3-0.6b": (0.6e9, 0.6e9, 114_688),
    "llama-3.1-70b": (70.6e9, 70.6e9, 327_680),
    "llama-3.1-8b": (8.03e9, 8.03e9, 131_072),
    "mixtral-8x7b": (46.7e9, 12.9e9, 131_072),
}
"""Parameters, active parameters (with both embeddings), KV bytes per token: from the model cards."""


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


@pytest.mark.parametrize(
    ("name", "preset"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L40S", "l40s"), ("NVIDIA GeForce RTX 4090", None)],
)
def test_presets_of_gpus(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset


def test_a_model_on_a_gpu_is_a_performance_model(tmp_path: Path) -> None:
    assert load_performance_model("qwen3-32b@h20").profile == analytic_model("qwen3-32b", "h20").profile
    folder = tmp_path / "at@home"
    folder.mkdir()
    write_config(folder, MIXTRAL)
    assert load_performance_model(f"{folder}@H200").profile == analytic_model(str(folder), "h200").profile


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3-32b@none", "unknown GPU 'none'"),
        ("none@h20", "unknown model 'none'"),
        ("qwen3-32b@", "unknown GPU ''"),
        (None, "--perf is missing"),
    ],
)
def test_a_performance_model_that_is_not_there_is_one_line(name: str | None, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load_performance_model(name)
    assert "\n" not in str(caught.value)
