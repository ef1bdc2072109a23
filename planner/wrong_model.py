"""Times that are wrong: what policies believe, while the engines keep to the true ones."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism


@dataclass(frozen=True)
class WrongModel:
    """Another model's times, each kind multiplied by a factor of its own."""

    model: PerformanceModel
    prefill: float = 1.0
    decode: float = 1.0
    transfer: float = 1.0

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:
        """Wrong prefill time."""
        return self.prefill * self.model.prefill_s(hist_tokens, incr_tokens, parallelism)

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:
        """Wrong time of one decode step."""
        return self.decode * self.model.decode_step_s(batch, context_tokens, parallelism)

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        """Wrong transfer time."""
        return self.transfer * self.model.kv_transfer_s(tokens, source, target)

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:
        """Wrong time of a copy from host memory."""
        return self.transfer * self.model.reload_s(tokens, parallelism)
