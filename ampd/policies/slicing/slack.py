"""Our slicing: as much prefill between two decode steps as every running round's ITL target can pay for."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.base import Slice
from ampd.policies.passes import shortest_pass_s
from ampd.policies.registry import Policy, register
from ampd.types import Parallelism, PrefillTask, RunningRound

_PRECISION_TOKENS = 16


@register("slicing", "slack")
class SlackSlicing(Policy):
    """Cut prefills so that no running round misses its mean ITL by them, and no waiting one stands behind a long one.

    Reads: history and increment of the task, its TTFT target; tokens, time and ITL target of every round that decodes
    here; prefill and step times of the performance model.

    Rule:

    1. A running round with n tokens out, the first of them e seconds ago, can be paused for
       `itl_share * itl * n - e - step` seconds and still have its mean ITL at its next token, and for what a step
       leaves of the target more with every further token that it is expected to have (`ahead_tokens`). The least of
       these is what the batch can pay now. A slice is the most tokens whose prefill fits in.
    2. A slice takes at least `least_passes` times the shortest pass, for shorter ones spend their time on reading the
       model's weights. If the batch cannot pay that much yet, it decodes until it can; a prefill that has waited for
       `patience` TTFT targets waits no more, for where rounds keep joining somebody can never pay.
    3. A round that could make up for what it has lost only in `lost_tokens` further tokens, or in none because a step
       alone takes longer than its target, is not waited for: its target is lost.
    4. With or without a batch no slice takes longer than `quantum` of the TTFT target, or `quantum_passes` if that is
       more: between two slices the ordering chooses again, so a round that has just come waits that long at most. The
       least slice may be longer.

    Limits: one slice costs a pass's fixed time more than none. A round's length is not known, so hardly more than the
    next token is counted on: a round that ends soon is protected, one that could make up for a longer pause later does
    not pay for it.

    Example: `--slicing slack`
    """

    itl_share: float = Field(0.92, ge=0.01, le=1, description="Share of the ITL target that is used up.")
    quantum: float = Field(0.15, gt=0, description="Longest slice, as a share of the TTFT target.")
    quantum_passes: float = Field(
        5.0, ge=0, description="Shortest passes that a slice may always take, however tight the TTFT target is."
    )
    least_passes: float = Field(2.0, ge=1, description="Least time of a slice, in shortest passes.")
    ahead_tokens: float = Field(1.0, ge=0, description="Further tokens that a running round is expected to have.")
    lost_tokens: int = Field(64, ge=1, description="Tokens within which a round must be able to make up for a pause.")
    patience: float = Field(
        10.0, gt=0, description="TTFT targets after which a prefill does not wait for the batch any more."
    )

    def slice(
        self,
        task: PrefillTask,
        running: Sequence[RunningRound],
        parallelism: Parallelism,
        model: PerformanceModel,
        now_s: float,
    ) -> Slice:
        """The next slice, or how long to wait for it."""
        hist_tokens, left_tokens = task.hist_tokens, task.incr_tokens
        shortest_s = shortest_pass_s(model, hist_tokens, parallelism)
        quantum_s = max(self.quantum * task.slo.ttft_s, self.quantum_passes * shortest_s)
        least_s = self.least_passes * shortest_s
        whole_s = model.prefill_s(hist_tokens, left_tokens, parallelism)
        budget_s, gain_s, step_s = self._budget(running, parallelism, model)
        needed_s = min(least_s, whole_s)
        if budget_s < needed_s and now_s - task.arrival_s < self.patience * task.slo.ttft_s:
            # Never for longer than for a lost round: what a step gains may be next to nothing, and batches change.
            steps = min(ceil((needed_s - budget_s) / gain_s), self.lost_tokens)
            # Half a step early: what is submitted during a step runs after it.
            return Slice(0, (steps - 0.5) * step_s)
        allowed_s = max(min(budget_s, quantum_s), needed_s)
        if whole_s <= allowed_s:
            return Slice(left_tokens)
        return Slice(most_tokens(model, hist_tokens, left_tokens, parallelism, allowed_s))

    def _budget(
        self, running: Sequence[RunningRound], parallelism: Parallelism, model: PerformanceModel
    ) -> tuple[float, float, float]:
        """(seconds that the batch can be paused now, what every step adds, seconds of a step)."""
        context_tokens = sum(one.context_tokens for one in running)
        step_s = model.decode_step_s(len(running), context_tokens, parallelism)
        budget_s, gain_s = inf, inf
        for one in running:
            target_s = self.itl_share * one.itl_slo_s
            spare_s = target_s - step_s
            pause_s = target_s * one.tokens - one.elapsed_s - step_s
            if spare_s <= 0.0 or pause_s < -self.lost_tokens * spare_s:
                continue
            budget_s = min(budget_s, pause_s + self.ahead_tokens * spare_s)
            gain_s = min(gain_s, spare_s)
        return budget_s, gain_s, step_s


def most_tokens(
    model: PerformanceModel, hist_tokens: int, left_tokens: int, parallelism: Parallelism, seconds: float
) -> int:
    """The largest part of an increment that is prefilled in `seconds`, at least one token, to a page's precision."""
    low, high = 1, left_tokens
    while high - low > _PRECISION_TOKENS:
        middle = (low + high) // 2
        if model.prefill_s(hist_tokens, middle, parallelism) <= seconds:
            low = middle
        else:
            high = middle
    return low
