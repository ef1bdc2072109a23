"""Model folders: the tiny one, broken ones, and readings of large ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.doctor.finding import Verdict
from ampd.cli.doctor.model import ModelReading, judge_model, kv_pool, read_model

GB = 1_000_000_000
QWEN = ModelReading("/models/qwen3-32b", "", "", "Qwen3ForCausalLM", "MHATokenToKVPool", int(65.5 * GB))


def test_the_tiny_model_can_be_served() -> None:
    reading = read_model("tiny", 2, needs_weights=True)
    assert reading.problem == ""
    assert (reading.architecture, reading.kv_pool) == ("LlamaForCausalLM", "MHATokenToKVPool")
    assert judge_model(reading, 2, GB, is_shared=True)[0].verdict is Verdict.OK


def test_a_folder_without_a_model_is_wrong(tmp_path: Path) -> None:
    reading = read_model(str(tmp_path), 1, needs_weights=True)
    assert "config.json" in reading.problem
    (finding,) = judge_model(reading, 1, GB, is_shared=False)
    assert (finding.verdict, finding.fix) == (Verdict.WRONG, "give a model folder in Hugging Face layout")


def test_each_problem_has_its_own_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fix(tp: int) -> str:
        (finding,) = judge_model(read_model("tiny", tp, needs_weights=True), tp, GB, is_shared=False)
        assert finding.verdict is Verdict.WRONG
        return finding.fix

    assert fix(3).startswith("use one of: 1, 2")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert fix(1).startswith("set XDG_CACHE_HOME")


def test_a_model_without_weights_serves_the_modelled_engine_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8}))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "no weights" in read_model(str(tmp_path), 1, needs_weights=True).problem
    assert read_model(str(tmp_path), 1, needs_weights=False).problem == ""


@pytest.mark.parametrize(
    ("config", "pool"),
    [
        ({"model_type": "qwen3"}, "MHATokenToKVPool"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLATokenToKVPool"),
        ({"model_type": "gpt_oss", "sliding_window": 128}, "SWAKVPool"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "HybridLinearKVPool"),
    ],
)
def test_families(config: dict[str, Any], pool: str) -> None:
    assert kv_pool(config) == pool


@pytest.mark.parametrize(
    ("reading", "tp", "gpu_gb", "is_shared", "verdict"),
    [
        (QWEN, 1, 143, False, Verdict.OK),
        (QWEN, 1, 143, True, Verdict.WRONG),
        (QWEN, 1, 48, False, Verdict.WRONG),
        (QWEN, 2, 48, False, Verdict.OK),
        (replace(QWEN, kv_pool="MLATokenToKVPool"), 8, 143, False, Verdict.SLOW),
    ],
)
def test_weights_must_fit(reading: ModelReading, tp: int, gpu_gb: int, is_shared: bool, verdict: Verdict) -> None:
    (finding,) = judge_model(reading, tp, gpu_gb * GB, is_shared=is_shared)
    assert finding.verdict is verdict
    assert bool(finding.fix) is (verdict is not Verdict.OK)
