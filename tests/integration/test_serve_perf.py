"""A graph of `ampd serve` decides with the times of the model that it serves, on the GPU of the machine."""

import json
import shutil
from pathlib import Path

import httpx
import pytest

from ampd.state.embedded import local_graphs
from ampd.tiny_model import tiny_model_path
from tests.harness.gpus import machine_with
from tests.harness.graph import record
from tests.integration.test_serve import serving
from tests.waiting import PATIENCE_S

QWEN3_32B = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@pytest.mark.long
def test_all_processes_take_the_times_of_the_model_on_the_gpu_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with(monkeypatch, tmp_path, *["NVIDIA H200"] * 8)
    folder = shutil.copytree(tiny_model_path(), tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | QWEN3_32B))
    logs, perf = tmp_path / "logs", f"{folder}@h200"
    flags = ("--engine", "modelled", "--prefill", "0", "--tp", "8", "--ttft", "0.5", "--log-dir", str(logs))
    with serving(*flags, "--model", str(folder)) as graph:
        assert [each.perf for each in local_graphs() if each.url == graph.url] == [perf]
        body = {"model": "mine", "prompt": [100] * 2000, "max_tokens": 1, "nvext": {"extra_fields": ["engine_data"]}}
        reply = httpx.post(f"{graph.url}/v1/completions", json=body, timeout=PATIENCE_S)
    # The tiny model's times have no degree 8, and refuse a prompt of this length because it would be late.
    assert reply.status_code == 200, reply.text
    assert record(reply.json())["route"] == "local"
    for name in ("coordinator-0", "decode-0"):
        assert f"performance model {perf}" in (logs / f"{name}.log").read_text()
