"""How long prefills, decode steps and KV moves take: the interface of performance models, and scaled ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ampd.types import Factors, Parallelism


@dataclass(frozen=True, slots=True)
class MixedPasses:
    """What an engine gains by a pass that prefills and is a step of the decode batch too.

    Attributes:
        saved: share that is saved of the time that one reading of the weights, instead of two, could save.
        context_s_per_token: cost of a token of the batch's context beyond that in a step of its own.
    """

    saved: float = 0.0
    context_s_per_token: float = 0.0


_SAVE_NOTHING = MixedPasses()


def joined_tokens(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(history, increment) of a pass over several parts: all new tokens behind the mean history of a new token."""
    incr_tokens = sum([incr for _, incr in parts])
    return sum([hist * incr for hist, incr in parts]) // max(incr_tokens, 1), incr_tokens


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
        """Time until KV of `tokens` of another worker can be loaded to the devices; 0 when `tokens` is 0.

        On one host it is loaded from where it lies.
        """

    @abstractmethod
    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:
        """Time to copy the KV of `tokens` from a worker's host memory to its devices; 0 when `tokens` is 0."""

    def mixed_passes(self, parallelism: Parallelism) -> MixedPasses:  # noqa: ARG002
        """What mixed passes gain. Where nothing was measured they count as saving nothing."""
        return _SAVE_NOTHING

    def mixed_pass_s(
        self, parts: Sequence[tuple[int, int]], batch: int, context_tokens: int, parallelism: Parallelism
    ) -> float:
        """Time of one pass over (history, increment) parts of prefills that is also a decode step of a batch.

        At best the batch's tokens share the pass's reading of the weights, and their attention comes on top.
        """
        mixed, factors = self.mixed_passes(parallelism), self.factors(parallelism)
        step_s = self.decode_step_s(batch, context_tokens, parallelism)
        if mixed.saved <= 0.0:
            return self.prefill_s(*joined_tokens(parts), parallelism) + step_s
        step_s /= factors.step
        seconds = self.prefill_s(*joined_tokens([*parts, (0, batch)]), parallelism) / factors.prefill
        seconds += step_s
        seconds -= self.decode_step_s(batch, 0, parallelism) / factors.step
        if mixed.saved < 1.0:
            apart_s = self.prefill_s(*joined_tokens(parts), parallelism) / factors.prefill + step_s
            seconds = apart_s - mixed.saved * (apart_s - seconds)
        return factors.mixed * (seconds + mixed.context_s_per_token * context_tokens)


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

    def mixed_passes(self, parallelism: Parallelism) -> MixedPasses:
        mixed = self.model.mixed_passes(parallelism)
        return MixedPasses(mixed.saved, self.decode * mixed.context_s_per_token)


def scaled(model: PerformanceModel, time_scale: float) -> PerformanceModel:
    """All times multiplied by `time_scale` (0.1: ten times faster; latency targets scale with it).

    Raises:
        ValueError: the scale is not positive and finite.
    """
    if not 0 < time_scale < float("inf"):
        raise ValueError(f"time_scale must be positive and finite, not {time_scale}")
    return model if time_scale == 1 else ScaledModel(model, time_scale, time_scale, time_scale)
