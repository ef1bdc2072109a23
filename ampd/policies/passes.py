"""Passes of the engine: the shortest one, whether mixed ones pay, and how much a pass prefills in a given time."""

from __future__ import annotations

from ampd.keys import PAGE_TOKENS
from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism


def shortest_pass_s(model: PerformanceModel, hist_tokens: int, parallelism: Parallelism) -> float:
    """Seconds of a pass for one page of tokens: nearly all of it reads weights, of all experts where there are some."""
    return model.prefill_s(hist_tokens, PAGE_TOKENS, parallelism)


def mixing_pays(
    model: PerformanceModel,
    hist_tokens: int,
    incr_tokens: int,
    batch: int,
    context_tokens: int,
    parallelism: Parallelism,
) -> bool:
    """Whether a pass that prefills and is a step of the batch too takes less time than a pass of each kind."""
    mixed_s = model.mixed_pass_s([(hist_tokens, incr_tokens)], batch, context_tokens, parallelism)
    prefill_s = model.prefill_s(hist_tokens, incr_tokens, parallelism)
    return mixed_s < prefill_s + model.decode_step_s(batch, context_tokens, parallelism)


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
