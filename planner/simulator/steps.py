"""How long an engine computes: prefill passes, and runs of decode steps in closed form.

A batch that does not change needs no event per token. Step k (from 0) of a run takes `first_s + k * growth_s`, because
the context of every request grows by a token per step and the time of a step is linear in the batch's context.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from ampd.perf.model import PerformanceModel
from ampd.policies.passes import joined_tokens, mixed_pass_s
from ampd.types import Parallelism


class EngineTimes:
    """What a performance model predicts for one replica."""

    __slots__ = ("_model", "_parallelism")

    def __init__(self, model: PerformanceModel, parallelism: Parallelism) -> None:
        self._model = model
        self._parallelism = parallelism

    def prefill_pass_s(self, parts: Sequence[tuple[int, int]]) -> float:
        """Seconds of one pass over (history, increment) parts."""
        hist_tokens, incr_tokens = parts[0] if len(parts) == 1 else joined_tokens(parts)
        return self._model.prefill_s(hist_tokens, incr_tokens, self._parallelism)

    def mixed_pass_s(self, parts: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Seconds of one pass over (history, increment) parts that is also a decode step of the batch."""
        if not batch:
            return self.prefill_pass_s(parts)
        return mixed_pass_s(self._model, parts, batch, context_tokens, self._parallelism)

    def steps(self, start_s: float, batch: int, context_tokens: int, steps: int) -> StepRun:
        """A run of decode steps of a batch with `context_tokens` of KV in total."""
        first_s = self._model.decode_step_s(batch, context_tokens, self._parallelism)
        growth_s = self._model.decode_step_s(batch, context_tokens + batch, self._parallelism) - first_s
        return StepRun(start_s, first_s, growth_s, steps)


class StepRun:
    """Consecutive decode steps from `start_s` on."""

    __slots__ = ("first_s", "growth_s", "start_s", "steps")

    def __init__(self, start_s: float, first_s: float, growth_s: float, steps: int) -> None:
        self.start_s = start_s
        self.first_s = first_s
        self.growth_s = growth_s
        self.steps = steps

    @property
    def end_s(self) -> float:
        return self.start_s + steps_s(self.first_s, self.growth_s, self.steps)

    def done(self, now_s: float) -> int:
        """Steps that have ended."""
        return min(steps_within(self.first_s, self.growth_s, now_s - self.start_s), self.steps)

    def cut(self, now_s: float) -> StepRun | None:
        """The run up to the end of the step in progress; None if it ends there anyway."""
        steps = steps_within(self.first_s, self.growth_s, now_s - self.start_s) + 1
        return StepRun(self.start_s, self.first_s, self.growth_s, steps) if steps < self.steps else None


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
    # Rounding may have gone either way: `steps_s` decides.
    while steps_s(first_s, growth_s, steps + 1) <= elapsed_s:
        steps += 1
    while steps and steps_s(first_s, growth_s, steps) > elapsed_s:
        steps -= 1
    return steps
