"""How long prefills, decode steps and KV moves take: the interface of performance models, and scaled ones."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ampd.types import Factors, Parallelism

# -- the performance model's interface: how long prefills, decode steps and KV moves take


class PerformanceModel(ABC):
    """Predicted times in seconds, for router, queue policies, simulator and planner.

    No protocol, because compiled calls of a class are faster.
    """

    def factors(self, parallelism: Parallelism) -> Factors:
        """The factors that are in the times of a worker."""
        return parallelism.factors

    @abstractmethod
    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:
        """Time to prefill `incr_tokens` behind `hist_tokens` of existing KV; 0 when there is nothing to prefill."""

    @abstractmethod
    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:
        """Time of one decode step of `batch` sequences with `context_tokens` of KV in total."""

    @abstractmethod
    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        """Time to move the KV of `tokens` between two workers; 0 when `tokens` is 0."""

    @abstractmethod
    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:
        """Time to copy the KV of `tokens` from a worker's host memory to its devices; 0 when `tokens` is 0."""


# -- a performance model with scaled times: for engines that run faster than real time, and for wrong predictions


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
