"""Orderings that give each task one number and run the task with the least: deadline, response ratio, length, age."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.base import Pick
from ampd.policies.registry import Policy, register
from ampd.types import Parallelism, PrefillTask


def first_of_least(ranks: Sequence[float]) -> Pick:
    """The task of the least rank, of equals the one that came first; everything before it counts as postponed."""
    index = ranks.index(min(ranks))
    return Pick(index, tuple(range(index)))


@register("ordering", "edf")
class EdfOrdering(Policy):
    """Run the task whose first token is due first.

    Reads: arrival and TTFT target of every task in the queue.

    Rule: the task with the least arrival + TTFT target runs; of equals the one that came first. With one target for
    all this is order of arrival.

    Limits: in overload it spends the worker on tasks that are too late already, and so makes the next ones late too.
    It knows no lengths.

    Example: `--ordering edf`
    """

    def pick(
        self,
        queue: Sequence[PrefillTask],
        parallelism: Parallelism,  # noqa: ARG002
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        rng: random.Random,  # noqa: ARG002
    ) -> Pick:
        """The task that is due first."""
        return first_of_least([task.arrival_s + task.slo.ttft_s for task in queue])


@register("ordering", "hrrn")
class HrrnOrdering(Policy):
    """Run the task with the highest response ratio: the time it has waited, in units of its own prefill time.

    Reads: history, increment and arrival of every task in the queue; the performance model's prefill times, one call
    for each task.

    Rule: the task with the highest (waited + prefill time) / prefill time runs; of equals the one that came first. A
    short task gains fast, a long one slowly but without end, so nobody starves.

    Limits: it knows no targets; behind a short queue it is close to shortest first, and a long queue of old tasks moves
    it towards order of arrival.

    Example: `--ordering hrrn`
    """

    def pick(
        self,
        queue: Sequence[PrefillTask],
        parallelism: Parallelism,
        model: PerformanceModel,
        now_s: float,
        rng: random.Random,  # noqa: ARG002
    ) -> Pick:
        """The task with the highest response ratio."""
        ranks = []
        for task in queue:
            prefill_s = model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism)
            # Without the constant 1. A task that takes no time has waited infinitely many of its own times.
            ranks.append(-(now_s - task.arrival_s) / prefill_s if prefill_s > 0.0 else -inf)
        return first_of_least(ranks)


@register("ordering", "shortest-prefill-first")
class ShortestPrefillFirst(Policy):
    """Run the task that the performance model expects to take the least time.

    Reads: history and increment of every task in the queue; the performance model's prefill times, one call for each
    task.

    Rule: the task with the least prefill time runs; of equals the one that came first. History counts: an increment
    behind a long context takes longer than the same one behind a short context.

    Limits: gives the least mean waiting time, but a long task waits for as long as shorter ones keep coming; it knows
    no targets.

    Example: `--ordering shortest-prefill-first`
    """

    def pick(
        self,
        queue: Sequence[PrefillTask],
        parallelism: Parallelism,
        model: PerformanceModel,
        now_s: float,  # noqa: ARG002
        rng: random.Random,  # noqa: ARG002
    ) -> Pick:
        """The task with the shortest prefill."""
        return first_of_least([model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism) for task in queue])


@register("ordering", "jct")
class JctOrdering(Policy):
    """Run the task with the fewest tokens to compute, and let tasks grow smaller as they wait.

    After the prefill-only optimisations of vLLM's disaggregated path: job completion time is taken to be proportional
    to the prompt's tokens without those whose KV is there.

    Reads: increment and arrival of every task in the queue.

    Rule: the task with the least increment - `ageing_tokens_per_s` * waited runs; of equals the one that came first.
    A task of c tokens is therefore only overtaken by tasks that came less than c / `ageing_tokens_per_s` seconds after
    it. Infinite ageing would be order of arrival; 0 is shortest first, and tasks may starve.

    Limits: what the history costs in attention and in reads does not count, nor do targets. The tokens to compute are
    those that the coordinator counted when it routed the round; a cache that changes while the task waits does not
    change its place.

    Example: `--ordering jct`, `--ordering "jct(ageing_tokens_per_s=500)"`
    """

    ageing_tokens_per_s: float = Field(
        1000.0, ge=0, description="By how many tokens a second a waiting task becomes smaller."
    )

    def pick(
        self,
        queue: Sequence[PrefillTask],
        parallelism: Parallelism,  # noqa: ARG002
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,
        rng: random.Random,  # noqa: ARG002
    ) -> Pick:
        """The task with the least aged length."""
        ageing = self.ageing_tokens_per_s
        return first_of_least([task.incr_tokens - ageing * (now_s - task.arrival_s) for task in queue])
