"""Model folders: the tiny one, broken ones, and readings of large ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ampd.cli.doctor import (
    ModelReading,
    Verdict,
    check_performance_model,
    judge_model,
    made,
    read_model,
)
from ampd.cli.serve.devices import FoundGpu
from ampd.errors import UserError
from ampd.perf.presets import load_performance_model

GB = 1_000_000_000
QWEN = ModelReading("/models/qwen3-32b", "Qwen3ForCausalLM", int(65.5 * GB))
H200 = FoundGpu(0, "NVIDIA H200", 143771, 4, "580.95.05")
L40S = FoundGpu(0, "NVIDIA L40S", 46068, 4, "580.95.05")


def test_the_tiny_model_can_be_served() -> None:
    reading = read_model("tiny", 2)
    assert reading.architecture == "LlamaForCausalLM"
    assert judge_model(reading, 2, [], GB).verdict is Verdict.OK


def test_each_problem_has_its_own_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fix(tp: int) -> str:
        finding = made("model", lambda: judge_model(read_model("tiny", tp), tp, [], GB))
        assert finding.verdict is Verdict.WRONG
        assert "ampd serve" not in finding.found
        return finding.fix

    assert fix(3).startswith("use one of: 1, 2")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert fix(1).startswith("set XDG_CACHE_HOME")


def test_a_folder_must_have_a_configuration_and_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        read_model(str(tmp_path), 1)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8}))
    finding = judge_model(read_model(str(tmp_path), 1), 1, [], GB)
    assert (finding.verdict, "no weights" in finding.found) == (Verdict.WRONG, True)


def test_times_of_kv_moves_are_needed(tmp_path: Path) -> None:
    profile = load_performance_model("tiny-cpu").profile.model_dump(mode="json", by_alias=True)
    profile["kv_transfers"] = [move for move in profile["kv_transfers"] if move["tp_target"] != 1]
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    assert check_performance_model("tiny-cpu", "tiny", 1).verdict is Verdict.OK
    with pytest.raises(UserError, match="no KV transfer times for tp 1 -> 1; "):
        check_performance_model(str(tmp_path / "profile.json"), "tiny", 1)


@pytest.mark.parametrize(
    ("reading", "tp", "gpus", "verdict", "words"),
    [
        (QWEN, 1, [H200] * 2, Verdict.OK, "135.7 GB for weights and KV on each GPU"),
        (QWEN, 1, [H200], Verdict.OK, "on each GPU"),
        (replace(QWEN, weight_bytes=70 * GB), 1, [H200], Verdict.WARNING, "too little for two workers"),
        (QWEN, 1, [H200, replace(H200, used_mib=90211)], Verdict.WRONG, "50.5 GB"),
        (QWEN, 1, [L40S] * 4, Verdict.WRONG, "43.5 GB"),
        (QWEN, 2, [L40S] * 4, Verdict.OK, "43.5 GB"),
        (QWEN, 2, [], Verdict.WRONG, "45.0 GB for weights and KV in the memory"),
        (replace(QWEN, weight_bytes=30 * GB), 2, [], Verdict.WARNING, "too little for two workers"),
    ],
)
def test_weights_must_fit(reading: ModelReading, tp: int, gpus: list[FoundGpu], verdict: Verdict, words: str) -> None:
    finding = judge_model(reading, tp, gpus, 50 * GB)
    assert finding.verdict is verdict
    assert words in finding.found
    assert bool(finding.fix) is (verdict is not Verdict.OK)
