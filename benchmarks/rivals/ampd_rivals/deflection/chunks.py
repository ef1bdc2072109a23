"""How a prefill is cut so that a decode batch stays within its ITL target: one chunk between two decode steps."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import tokens_within
from ampd.types import Parallelism, PrefillTask

FLOOR_TOKENS = 16
"""Smallest chunk of a schedule, beside the last one. So many are computed between two steps even if that makes the step
late."""


def largest_chunk_tokens(
    hist_tokens: int,
    left_tokens: int,
    limit_s: float,
    parallelism: Parallelism,
    model: PerformanceModel,
    guess_tokens: int = 0,
) -> int:
    """The most of `left_tokens` whose prefill behind `hist_tokens` takes at most `limit_s`; 0 if one token exceeds it.

    A good guess (the chunk before it) saves most of the search.
    """
    if model.prefill_s(hist_tokens, left_tokens, parallelism) <= limit_s:
        return left_tokens
    return tokens_within(limit_s, hist_tokens, 0, left_tokens, parallelism, model, guess_tokens=guess_tokens)


def chunked_s(
    tasks: Iterable[PrefillTask],
    step_s: float,
    itl_slo_s: float,
    until_s: float,
    parallelism: Parallelism,
    model: PerformanceModel,
) -> float:
    """Time until the last of `tasks`, cut one after the other, is done; infinite if the batch leaves too little room.

    Before each chunk the batch makes a step of `step_s` (0: nothing decodes, and nothing is cut). Each chunk is the
    largest that keeps chunk and step within `itl_slo_s`; a chunk below `FLOOR_TOKENS` is not worth its step, unless it
    is all that is left. The sum stops when it has reached `until_s`.
    """
    room_s = itl_slo_s - step_s if step_s > 0.0 else inf
    total_s, guess = 0.0, 0
    for task in tasks:
        hist, left = task.hist_tokens, task.incr_tokens
        while left > 0 and total_s < until_s:
            tokens = largest_chunk_tokens(hist, left, room_s, parallelism, model, guess)
            if tokens < min(FLOOR_TOKENS, left):
                return inf
            total_s += step_s + model.prefill_s(hist, tokens, parallelism)
            if tokens < left:
                guess = tokens
            hist, left = hist + tokens, left - tokens
    return total_s
