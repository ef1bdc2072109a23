"""The GPU of this machine, and the dimensions of the dense models that run on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ampd.perf.gpus import GPUS, Gpu, preset_of
from ampd.perf.model_shape import ModelShape
from ampd.perf.presets import MODELS, model_shape


def preset() -> Gpu:
    """The preset of the GPU that this process has."""
    name = torch.cuda.get_device_name()
    if found := preset_of(name):
        return GPUS[found]
    raise SystemExit(f"no preset for {name}; known: {', '.join(GPUS)}")


@dataclass(frozen=True)
class DenseModel:
    """A preset of a model whose layers are all alike, with attention and one gated MLP."""

    shape: ModelShape
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @classmethod
    def of(cls, name: str) -> DenseModel:
        config = MODELS[name]["config"]
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        sizes = (config["num_key_value_heads"], config.get("head_dim", hidden // heads), config["intermediate_size"])
        return cls(model_shape(name), config["num_hidden_layers"], heads, *sizes)
