"""Passes of the engine: the time of the shortest one, and several prefills in one."""

from __future__ import annotations

from collections.abc import Sequence

from ampd.keys import PAGE_TOKENS
from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism, PrefillTask


def as_one(tasks: Sequence[PrefillTask]) -> PrefillTask:
    """One task that stands for all: its increment is their sum, its history their mean, weighted by new tokens."""
    hist_tokens, incr_tokens = joined_tokens([(task.hist_tokens, task.incr_tokens) for task in tasks])
    return tasks[0].with_tokens(hist_tokens, incr_tokens)


def joined_tokens(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(history, increment) of a pass over several parts: all new tokens behind the mean history of a new token."""
    incr_tokens = sum([incr for _, incr in parts])
    return sum([hist * incr for hist, incr in parts]) // max(incr_tokens, 1), incr_tokens


def shortest_pass_s(model: PerformanceModel, hist_tokens: int, parallelism: Parallelism) -> float:
    """Seconds of a pass for one page of tokens: nearly all of it reads weights, of all experts where there are some."""
    return model.prefill_s(hist_tokens, PAGE_TOKENS, parallelism)


def mixed_pass_s(
    model: PerformanceModel, parts: Sequence[tuple[int, int]], batch: int, context_tokens: int, parallelism: Parallelism
) -> float:
    """Seconds of one pass over (history, increment) parts that is also a decode step of a batch.

    The batch's tokens share the pass's reading of the weights; their attention comes on top.
    """
    factors = model.factors(parallelism)
    seconds = model.prefill_s(*joined_tokens([*parts, (0, batch)]), parallelism) / factors.prefill
    seconds += model.decode_step_s(batch, context_tokens, parallelism) / factors.step
    return factors.mixed * (seconds - model.decode_step_s(batch, 0, parallelism) / factors.step)


def tokens_within(
    limit_s: float,
    hist_tokens: int,
    fits: int,
    exceeds: int,
    parallelism: Parallelism,
    model: PerformanceModel,
    *,
    precision_tokens: int = 1,
    guess_tokens: int = 0,
) -> int:
    """The most tokens whose prefill behind `hist_tokens` takes at most `limit_s`, between `fits` and `exceeds`.

    Args:
        fits: the least answer.
        exceeds: more tokens than the answer, unless it is `fits`.
        precision_tokens: the answer may be less by fewer than this number of tokens.
        guess_tokens: a good guess saves most of the search; 0: none.
    """
    stride, probe = 1, guess_tokens
    while exceeds - fits > precision_tokens:
        if not guess_tokens or not fits < probe < exceeds:
            probe = (fits + exceeds) // 2
        if model.prefill_s(hist_tokens, probe, parallelism) <= limit_s:
            fits, probe = probe, probe + stride
        else:
            exceeds, probe = probe, probe - stride
        stride *= 4
    return fits
