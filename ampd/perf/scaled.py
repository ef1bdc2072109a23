"""A performance model with scaled times, so that a modelled engine can run faster or slower than real time."""

from __future__ import annotations

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism


class ScaledModel:
    """Another model's times multiplied by `time_scale` (0.1: ten times faster; latency targets scale with it)."""

    def __init__(self, model: PerformanceModel, time_scale: float) -> None:
        if not 0 < time_scale < float("inf"):
            raise ValueError(f"time_scale must be positive and finite, not {time_scale}")
        self.model = model
        self.time_scale = time_scale

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:
        return self.time_scale * self.model.prefill_s(hist_tokens, incr_tokens, parallelism)

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:
        return self.time_scale * self.model.decode_step_s(batch, context_tokens, parallelism)

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        return self.time_scale * self.model.kv_transfer_s(tokens, source, target)

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:
        return self.time_scale * self.model.reload_s(tokens, parallelism)


def scaled(model: PerformanceModel, time_scale: float) -> PerformanceModel:
    """`model` itself at scale 1, else its times multiplied by `time_scale` > 0."""
    return model if time_scale == 1 else ScaledModel(model, time_scale)
