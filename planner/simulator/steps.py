"""Decode steps in closed form: a batch that does not change needs no event per token.

Step k (from 0) of a run takes `first_s + k * growth_s`, for every sequence's context grows by a token a step and a
step's time is linear in the batch's context.
"""

from __future__ import annotations

from math import sqrt

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism


def step_times(
    model: PerformanceModel, batch: int, context_tokens: int, parallelism: Parallelism
) -> tuple[float, float]:
    """(seconds of the next step, growth per step) of a batch with `context_tokens` of KV in total."""
    first_s = model.decode_step_s(batch, context_tokens, parallelism)
    return first_s, model.decode_step_s(batch, context_tokens + batch, parallelism) - first_s


def steps_s(first_s: float, growth_s: float, steps: int) -> float:
    """Seconds of `steps` consecutive steps."""
    return steps * (first_s + 0.5 * growth_s * (steps - 1))


def steps_within(first_s: float, growth_s: float, elapsed_s: float) -> int:
    """How many steps have ended `elapsed_s` seconds after the first began."""
    if elapsed_s < first_s:
        return 0
    if growth_s <= 0.0:
        steps = int(elapsed_s / first_s)
    else:
        linear_s = first_s - 0.5 * growth_s
        # This form of the root stays exact where the growth is tiny.
        steps = int(2.0 * elapsed_s / (linear_s + sqrt(linear_s * linear_s + 2.0 * growth_s * elapsed_s)))
    # Rounding may have gone either way: what counts is what `steps_s` says.
    while steps_s(first_s, growth_s, steps + 1) <= elapsed_s:
        steps += 1
    while steps and steps_s(first_s, growth_s, steps) > elapsed_s:
        steps -= 1
    return steps
