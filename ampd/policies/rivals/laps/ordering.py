"""Length-aware prefill: short and long tasks take turns, shorts are gathered into batches (after arXiv 2601.11589)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.base import Pick
from ampd.policies.registry import Policy, register
from ampd.types import Parallelism, PrefillTask

_LENGTHS = (8, 256)
_BATCHES = (1, 64)
"""Least and greatest bucket of a captured graph, in tokens of the longest member and in members."""
_WORTH_S = 0.001
"""No timer is exact enough for a shorter wait."""


@register("ordering", "laps")
class LapsOrdering(Policy):
    """Keep short and long prefills apart: they take turns, and short ones run as a batch in one pass.

    After LAPS (arXiv 2601.11589), the temporal form: one instance alternates between the classes.

    Reads: history, increment, arrival, TTFT target and postponements of every task in the queue; the performance
    model's prefill time of a batch, one call for each pick.

    Rule: a task of at most `boundary_tokens` new tokens is short. While both classes wait they take turns: a pick
    counts as a postponement of the first task of the class that is passed over, and the class whose first task was
    postponed more often is next (of equals, the one whose first task came first). A long task runs alone. The shorts
    run in order of arrival, up to `depth` in one pass. A batch that is not full waits for more only while no long task
    waits, and until the earliest of
    - `max_wait_s` after its first task came;
    - what its most urgent task can spare: its deadline - the time that the batch takes - `margin_s`;
    - the moment from which nobody else is expected in time: as many shorts are expected in the time left as came, for
      the time since the first of them.
    The batch takes the prefill time of the smallest captured bucket that it fits into (powers of two: the longest
    member 8 to 256 tokens, 1 to 64 members), or of its own tokens where none fits.

    Limits: what the paper adapts is approximated. A policy keeps nothing between two picks, so the arrival rate of
    shorts is measured over the queue alone, from the first waiting short on. The wait and the depth that the paper
    adapts after each dispatch both follow from that rate at each pick: the depth aimed for is what the rate brings in
    the time left, at most `depth`. A single short therefore waits half of `max_wait_s` for company. W_min is 0, T_max
    is `max_wait_s`, sigma and delta are one margin. The boundary is a constant, not fitted from samples. Chunks of
    long tasks, the padding and the graphs belong to the engine. Every round has a TTFT target, so the rule without
    deadlines has no place.

    Example: `--ordering laps`, `--ordering "laps(boundary_tokens=512, max_wait_s=0.01)"`
    """

    boundary_tokens: int = Field(256, ge=1, description="The longest increment that counts as short.")
    depth: int = Field(_BATCHES[1], ge=1, le=1024, description="The most shorts in one pass.")
    max_wait_s: float = Field(0.02, ge=0, le=1, description="The longest wait of a short for others, in seconds.")
    margin_s: float = Field(0.005, ge=0, description="What a wait leaves of the slack of the most urgent, in seconds.")

    def pick(
        self,
        queue: Sequence[PrefillTask],
        parallelism: Parallelism,
        model: PerformanceModel,
        now_s: float,
        rng: random.Random,  # noqa: ARG002
    ) -> Pick:
        """A long task, or a batch of shorts, now or later."""
        shorts: list[int] = []
        first_long = -1
        for position, task in enumerate(queue):
            if task.incr_tokens <= self.boundary_tokens:
                shorts.append(position)
            elif first_long < 0:
                first_long = position
        if not shorts:
            return Pick(first_long)
        head, *others = shorts[: self.depth]
        if first_long < 0:
            tasks = [queue[position] for position in (head, *others)]
            return Pick(head, (), tuple(others), self._wait_s(tasks, parallelism, model, now_s))
        if _is_before(queue, first_long, head):
            return Pick(first_long, (head,))
        return Pick(head, (first_long,), tuple(others))

    def _wait_s(
        self, shorts: Sequence[PrefillTask], parallelism: Parallelism, model: PerformanceModel, now_s: float
    ) -> float:
        """How long these shorts, which wait alone, should wait for more; 0: not at all."""
        count = len(shorts)
        first_s = min(task.arrival_s for task in shorts)
        if count >= self.depth or now_s - first_s >= self.max_wait_s:
            return 0.0
        due_s = min(task.arrival_s + task.slo.ttft_s for task in shorts)
        latest_s = due_s - batch_s(shorts, parallelism, model) - self.margin_s
        end_s = min(first_s + self.max_wait_s, latest_s)
        # After t seconds with `count` arrivals, the (end - t) seconds left bring count * (end - t) / t: less than one
        # from here on.
        hopeful_s = first_s + (end_s - first_s) * count / (count + 1)
        wait_s = hopeful_s - now_s
        return wait_s if wait_s >= _WORTH_S else 0.0


def batch_s(tasks: Sequence[PrefillTask], parallelism: Parallelism, model: PerformanceModel) -> float:
    """Prefill time of one pass over these tasks, padded to the captured bucket if there is one, in seconds."""
    increments = [task.incr_tokens for task in tasks]
    tokens = sum(increments)
    length, batch = _bucket(max(increments), *_LENGTHS), _bucket(len(tasks), *_BATCHES)
    hist_tokens = sum(task.hist_tokens * task.incr_tokens for task in tasks) // max(tokens, 1)
    return model.prefill_s(hist_tokens, length * batch or tokens, parallelism)


def _bucket(size: int, least: int, greatest: int) -> int:
    """The smallest power of two that holds `size`, at least `least`; 0: none up to `greatest` does."""
    if size > greatest:
        return 0
    return max(1 << (max(size, 1) - 1).bit_length(), least)


def _is_before(queue: Sequence[PrefillTask], first: int, other: int) -> bool:
    """Whether it is the turn of the class of the task at `first`."""
    return (-queue[first].postponements, first) < (-queue[other].postponements, other)
