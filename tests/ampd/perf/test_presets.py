"""Presets against published figures, and refusals in one line."""

import json
from pathlib import Path

import pytest

from ampd.errors import UserError
from ampd.perf.gpus import GPUS, gpu, preset_of
from ampd.perf.presets import MODELS, analytic_model, load_performance_model, model_shape
from ampd.perf.roofline import MemoryShare, kv_capacity_tokens

from .config_lab import MIXTRAL, write_config

PUBLISHED = {
    "qwen3-32b": (32.8, 32.8, 256),
    "qwen3-32b-fp8": (32.8, 32.8, 256),
    "qwen3-0.6b": (0.6, 0.6, 112),
    "qwen3-30b-a3b": (30.5, 3.3, 96),
    "qwen3-coder-30b-a3b": (30.5, 3.3, 96),
    "qwen3-235b-a22b-fp8": (235, 22, 188),
    "qwen3-next-80b-a3b": (79.67, 3.9, 24),
    "qwen3.5-122b-a10b": (122, 9.8, 24),
    "llama-3.1-70b": (70.6, 70.6, 320),
    "llama-3.3-70b": (70.6, 70.6, 320),
    "llama-3.1-8b": (8.03, 8.03, 128),
    "mixtral-8x7b": (46.7, 12.9, 128),
    "gpt-oss-20b": (20.9, 3.6, 24),
    "gpt-oss-120b": (116.8, 5.1, 36),
    "deepseek-v3": (671, 37, 68.625),
    "deepseek-v3.2": (671, 37, 76.5),
    "kimi-k2": (1026, 32.5, 68.625),
    "glm-4.5": (353, 32.9, 368),
    "glm-4.5-air": (106.9, 12.8, 184),
    "glm-5-fp8": (744, 40, 97.8),
    "minimax-m2.5": (228.7, 10, 248),
    "gemma-3-27b": (27.0, 27.0, 496),
    "gemma-4-26b-a4b": (25.2, 3.8, 20),
    "nemotron-3-nano-30b-a3b": (31.6, 3.2, 6),
    "nemotron-h-56b": (56.3, 56.3, 40),
}
"""Parameters and active parameters in 10^9, as the model cards have them (GLM-4.5 without the layer that predicts a
second token), and KiB of KV per token of a long context."""


@pytest.mark.parametrize("name", sorted(MODELS))
def test_presets_have_the_published_sizes(name: str) -> None:
    shape, (parameters, active, kv_kib) = model_shape(name), PUBLISHED[name]
    embeddings = shape.output_parameters * (1 if shape.is_tied else 2)
    assert shape.parameters == pytest.approx(1e9 * parameters, rel=0.01)
    # Some cards count both embeddings as active, and others one or none of them.
    assert shape.active_parameters < 1.02e9 * active
    assert shape.active_parameters + embeddings > 0.98e9 * active
    assert shape.kv_bytes_per_token == pytest.approx(1024 * kv_kib, rel=0.01)


def test_a_config_file_says_the_same_as_the_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    preset = model_shape("mixtral-8x7b")
    for path in (tmp_path, tmp_path / "config.json"):
        shape = model_shape(str(path))
        assert (shape.layers, shape.max_context_tokens) == (preset.layers, 32768)
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
    with pytest.raises(UserError, match=r"deepseek-v3, .*gpt-oss-120b, .*qwen3-32b"):
        analytic_model("gpt-5", "h20")
    with pytest.raises(UserError, match=r"a100, .*b200, .*h100, .*mi300x"):
        analytic_model("qwen3-32b", "tpu")


def test_degrees_that_do_not_fit_are_left_out_and_none_is_an_error(tmp_path: Path) -> None:
    assert [theta.tp for theta in analytic_model("llama-3.1-70b", "h100").parallelisms] == [2, 4, 8]
    assert [theta.tp for theta in analytic_model("qwen3-32b", "l40s").parallelisms] == [2, 4, 8]
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"num_local_experts": 512}))
    with pytest.raises(UserError, match=r"does not fit: its weights take \d+ GB, 8 x NVIDIA L40S leave \d+ GB"):
        analytic_model(str(tmp_path), "l40s")
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"num_attention_heads": 25, "head_dim": 128}))
    with pytest.raises(UserError, match="divides its heads"):
        analytic_model(str(tmp_path), "h200", degrees=(2, 4, 8))


def test_kv_takes_what_the_weights_leave() -> None:
    shape, card = model_shape("llama-3.1-8b"), gpu("h100")
    whole = kv_capacity_tokens(shape, card, 1, MemoryShare(usable_share=1.0, reserve_bytes=0))
    assert whole * shape.kv_bytes_per_token == pytest.approx(card.memory_bytes - shape.weight_bytes, abs=200_000)
    two = kv_capacity_tokens(shape, card, 2, MemoryShare(usable_share=1.0, reserve_bytes=0))
    assert two * shape.kv_bytes_per_token == pytest.approx(2 * card.memory_bytes - shape.weight_bytes, abs=300_000)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H20-3e", "h20-3e"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_presets_of_gpus(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset


def test_every_preset_is_found_by_its_own_name() -> None:
    assert [preset_of(card.name) for card in GPUS.values()] == list(GPUS)


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
