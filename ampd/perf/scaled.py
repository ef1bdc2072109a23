"""A performance model with scaled times: for engines that run faster than real time, and for wrong predictions."""

from __future__ import annotations

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism


class ScaledModel(PerformanceModel):
    """Another model's times, each kind multiplied by a factor of its own.

    It is no dataclass, because a compiled one cannot have this base.
    """

    def __init__(
        self, model: PerformanceModel, prefill: float = 1.0, decode: float = 1.0, transfer: float = 1.0
    ) -> None:
        self.model = model
        self.prefill = prefill
        self.decode = decode
        self.transfer = transfer

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:
        return self.prefill * self.model.prefill_s(hist_tokens, incr_tokens, parallelism)

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:
        return self.decode * self.model.decode_step_s(batch, context_tokens, parallelism)

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        return self.transfer * self.model.kv_transfer_s(tokens, source, target)

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:
        return self.transfer * self.model.reload_s(tokens, parallelism)


def scaled(model: PerformanceModel, time_scale: float) -> PerformanceModel:
    """All times multiplied by `time_scale` (0.1: ten times faster; latency targets scale with it).

    Raises:
        ValueError: the scale is not positive and finite.
    """
    if not 0 < time_scale < float("inf"):
        raise ValueError(f"time_scale must be positive and finite, not {time_scale}")
    return model if time_scale == 1 else ScaledModel(model, time_scale, time_scale, time_scale)
