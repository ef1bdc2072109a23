"""The performance model's interface: how long prefills, decode steps and KV moves take."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ampd.types import Parallelism


class PerformanceModel(ABC):
    """Predicted times in seconds, for router, queue policies, simulator and planner.

    No protocol, because compiled calls of a class are faster.
    """

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
