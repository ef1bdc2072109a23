"""Which preset belongs to the name that the driver gives a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from ampd.perf.gpus import GPUS  # noqa: E402
from benchmarks.this_gpu import DenseModel, preset  # noqa: E402


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA H200", "h200"), ("NVIDIA H20", "h20"), ("NVIDIA H100 80GB HBM3", "h100"), ("L40S", "l40s")],
)
def test_a_preset_is_found_by_whole_words(monkeypatch: pytest.MonkeyPatch, name: str, key: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert preset() is GPUS[key]


def test_an_unknown_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA RTX 4090")
    with pytest.raises(SystemExit, match="no preset for NVIDIA RTX 4090"):
        preset()


def test_a_dense_model_has_the_dimensions_of_its_preset() -> None:
    model = DenseModel.of("llama-3.1-8b")
    assert (model.layers, model.heads, model.kv_heads, model.head_dim, model.intermediate) == (32, 32, 8, 128, 14336)
    assert 2 * model.layers * model.kv_heads * model.head_dim * 2 == model.shape.kv_bytes_per_token
