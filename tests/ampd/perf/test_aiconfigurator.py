"""The import from AIConfigurator: against its own numbers, and refusals in one line."""

import json
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from ampd.errors import UserError
from ampd.perf.fit import aiconfigurator_model
from ampd.perf.presets import MODELS, analytic_model, model_shape
from ampd.types import Parallelism

aiconfigurator = pytest.importorskip("aiconfigurator_core")
TP4 = Parallelism(4)


@pytest.mark.slow
def test_the_curves_are_those_of_the_package() -> None:
    from aiconfigurator_core.sdk.engine import EngineHandle

    theirs = EngineHandle.compile("meta-llama/Meta-Llama-3.1-8B", "h100_sxm", "sglang", tp_size=4)
    ours = aiconfigurator_model("llama-3.1-8b", "h100", degrees=(4,))
    for hist, incr in ((0, 700), (0, 3000), (2000, 300), (8000, 1500), (30_000, 1500)):
        expected_s = theirs.predict_prefill_latency(1, hist + incr, hist) / 1e3
        assert ours.prefill_s(hist, incr, TP4) == pytest.approx(expected_s, rel=0.08)
    for batch, context in ((1, 2000), (24, 700), (100, 3000)):
        expected_s = theirs.predict_decode_latency(batch, context) / 1e3
        assert ours.decode_step_s(batch, batch * context, TP4) == pytest.approx(expected_s, rel=0.15)


PUBLISHED = {
    "qwen3-32b": "Qwen--Qwen3-32B",
    "qwen3-32b-fp8": "Qwen--Qwen3-32B-FP8",
    "qwen3-0.6b": "Qwen--Qwen3-0.6B",
    "qwen3-30b-a3b": "Qwen--Qwen3-30B-A3B",
    "qwen3-235b-a22b-fp8": "Qwen--Qwen3-235B-A22B-FP8",
    "qwen3.5-122b-a10b": "Qwen--Qwen3.5-122B-A10B",
    "llama-3.1-70b": "meta-llama--Meta-Llama-3.1-70B",
    "llama-3.1-8b": "meta-llama--Meta-Llama-3.1-8B",
    "mixtral-8x7b": "mistralai--Mixtral-8x7B-v0.1",
    "gpt-oss-20b": "openai--gpt-oss-20b",
    "gpt-oss-120b": "openai--gpt-oss-120b",
    "deepseek-v3": "deepseek-ai--DeepSeek-V3",
    "deepseek-v3.2": "deepseek-ai--DeepSeek-V3.2",
    "kimi-k2": "moonshotai--Kimi-K2-Instruct",
    "glm-5-fp8": "zai-org--GLM-5-FP8",
    "minimax-m2.5": "MiniMaxAI--MiniMax-M2.5",
    "gemma-4-26b-a4b": "google--gemma-4-26B-A4B",
    "nemotron-3-nano-30b-a3b": "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron-h-56b": "nvidia--Nemotron-H-56B-Base-8K",
}
"""Presets, and the models' own config.json files in the package."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "qwen3-32b", "qwen3-32b-fp8"])
def test_the_roofline_is_not_far_from_it(name: str) -> None:
    """Both describe the same hardware: a factor of two between them would be a mistake in one."""
    theirs = aiconfigurator_model(name, "h200", degrees=(4,))
    ours = analytic_model(name, "h200", degrees=(4,))
    for incr in (512, 4096):
        assert 0.5 < ours.prefill_s(0, incr, TP4) / theirs.prefill_s(0, incr, TP4) < 2
    for batch in (1, 16, 64):
        ratio = ours.decode_step_s(batch, 1000 * batch, TP4) / theirs.decode_step_s(batch, 1000 * batch, TP4)
        assert 0.5 < ratio < 2
    assert ours.kv_capacity_tokens(TP4) == theirs.kv_capacity_tokens(TP4)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_presets_are_what_the_published_configuration_says(name: str) -> None:
    file = f"{PUBLISHED[name]}_config.json"
    theirs = model_shape(str(files("aiconfigurator_core") / "model_configs" / file))
    assert replace(theirs, name=model_shape(name).name) == model_shape(name)


@pytest.mark.slow
def test_the_error_of_the_fit_is_told_and_small() -> None:
    error = aiconfigurator_model("llama-3.1-8b", "h100", degrees=(2, 4)).provenance.fit_error
    assert set(error) == {"prefill_mean", "prefill_max", "decode_mean", "decode_max"}
    for curve in ("prefill", "decode"):
        assert 0 < error[f"{curve}_mean"] < 0.05
        assert error[f"{curve}_mean"] < error[f"{curve}_max"] < 0.2


def test_a_users_own_file_of_any_name_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(MODELS["llama-3.1-8b"]["config"]))
    (tmp_path / "config.json").write_text("another model's")
    own = aiconfigurator_model(str(tmp_path / "mine.json"), "h100", degrees=(4,))
    assert own.profile.workers == aiconfigurator_model("llama-3.1-8b", "h100", degrees=(4,)).profile.workers


def test_formats_of_weights_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-3.1-8b"]["config"]))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    whole, halved = (aiconfigurator_model(name, "h100", degrees=(1,)) for name in ("llama-3.1-8b", str(tmp_path)))
    alone = Parallelism(1)
    assert halved.decode_step_s(1, 1000, alone) < 0.7 * whole.decode_step_s(1, 1000, alone)


def test_a_model_that_it_does_not_know_is_one_line(tmp_path: Path) -> None:
    config = MODELS["llama-3.1-8b"]["config"] | {"architectures": ["NobodysForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="AIConfigurator cannot model") as caught:
        aiconfigurator_model(str(tmp_path), "h100", degrees=(4,))
    assert "\n" not in str(caught.value)


def test_a_gpu_without_data_is_refused() -> None:
    with pytest.raises(UserError, match="no data for NVIDIA H20; it has a100, b200, b300, gb200, h100, h200, l40s"):
        aiconfigurator_model("qwen3-32b", "h20")


def test_without_the_package_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(UserError, match=r"uv pip install --editable '\.\[aiconfigurator\]'"):
        aiconfigurator_model("qwen3-32b", "h100")
