"""Our slicing: as much prefill in the next pass as the ITL target of every running round allows."""

from __future__ import annotations

from math import inf
from typing import ClassVar

from ampd.policies import estimates
from ampd.policies.base import SlicingSituation
from ampd.policies.estimates import mixing_pays, shortest_pass_s, tokens_within
from ampd.policies.registry import Policy, register

_PRECISION_TOKENS = 16


@register("slicing", "slack")
class SlackSlicing(Policy):
    """Prefill as much in a pass as does not push a decoding round over its mean ITL target, as the performance model
    predicts it.

    Reads: history and increment of the prefills, TTFT target of the oldest; tokens, time and ITL target of every round
    that decodes here; times of prefills, steps and mixed passes of the performance model.

    Rule:

    1. A running round has n tokens out, the first of them e seconds ago. It can be paused for `0.92 * itl * n - e -
       step` seconds and still meet its mean ITL. The shortest of these pauses is the budget of the batch. A pass
       prefills the most tokens that take no longer. Without a running round it prefills all.
    2. Where a mixed pass is predicted to be shorter than a prefill and a step, the pass is mixed. The budget is then
       larger by the time that it saves. If not even a tenth of the shortest pass fits, the step comes alone. Otherwise
       a pass prefills a page at least.
    3. Where it is not, the batch pauses for the pass. The budget is then larger by the part of the target that one
       further step leaves over. While two shortest passes do not fit, the step comes alone, and a pass takes these at
       least.
    4. No prefill waits for longer than 10 TTFT targets, and after a quarter of its own target none waits for rounds
       with a tighter ITL target than its own. The batch does not wait for a round whose target is lost: it could make
       up for its delay only in more than 64 further tokens, or never.

    Limits: each pass has a fixed time. The length of a round is not known. With a large batch a mixed pass may take
    half longer than the budget, because it is not counted that the batch's rows are tokens of the pass.

    Example: `--slicing slack`
    """

    ITL_SHARE: ClassVar[float] = estimates.ITL_SHARE
    LEAST_PASSES: ClassVar[float] = 2.0
    """Least time of a prefill for which the batch pauses, in shortest passes."""
    LEAST_BESIDE_PASSES: ClassVar[float] = 0.1
    """Least budget for a prefill in a mixed pass, in shortest passes. It has a page at least."""
    AHEAD_TOKENS: ClassVar[float] = 1.0
    """Tokens beyond the next that a running round is expected to have, if the batch pauses."""
    LOST_TOKENS: ClassVar[int] = 64
    """Tokens within which a round must be able to make up for a pause."""
    MOST_WAIT_TARGETS: ClassVar[float] = 10.0
    """TTFT targets after which a prefill does not wait for the batch any more."""
    MOST_WAIT_S: ClassVar[float] = 60.0
    """The same in seconds, however loose the TTFT target is."""
    TIGHTER_WAIT_TARGETS: ClassVar[float] = 0.25
    """TTFT targets after which a prefill does not wait for rounds with a tighter ITL target than its own."""

    def slice(self, situation: SlicingSituation) -> int:
        if not situation.running:
            return situation.task.incr_tokens
        model, parallelism, task = situation.model, situation.parallelism, situation.task
        batch, context_tokens = len(situation.running), sum([round_.context_tokens for round_ in situation.running])
        step_s = model.decode_step_s(batch, context_tokens, parallelism)
        mixed = model.mixed_passes(parallelism)
        if mixed.saved > 0.0:
            budget_s = self._budget_s(situation, step_s, 0.0)
            budget_s += mixed.saved * model.decode_step_s(batch, 0, parallelism)
            budget_s -= mixed.context_s_per_token * context_tokens
            tokens = 0
            if budget_s >= self.LEAST_BESIDE_PASSES * _shortest_s(situation) or not self._may_wait(situation):
                tokens = _tokens_in(situation, budget_s, _whole_s(situation))
            if mixing_pays(model, task.hist_tokens, tokens or 1, batch, context_tokens, parallelism):
                return tokens
        return self._between_steps(situation, step_s)

    def _between_steps(self, situation: SlicingSituation, step_s: float) -> int:
        whole_s = _whole_s(situation)
        budget_s = self._budget_s(situation, step_s, self.AHEAD_TOKENS)
        needed_s = min(self.LEAST_PASSES * _shortest_s(situation), whole_s)
        if budget_s < needed_s and self._may_wait(situation):
            return 0
        return _tokens_in(situation, max(budget_s, needed_s), whole_s)

    def _may_wait(self, situation: SlicingSituation) -> bool:
        task = situation.task
        most_wait_s = min(self.MOST_WAIT_TARGETS * task.slo.ttft_s, self.MOST_WAIT_S)
        return situation.now_s - task.arrival_s < most_wait_s

    def _budget_s(self, situation: SlicingSituation, step_s: float, ahead_tokens: float) -> float:
        """Seconds that the batch can be paused now.

        Args:
            step_s: time of its next step.
            ahead_tokens: beyond the next one, which each running round is expected to have.
        """
        itl_share, lost_tokens = self.ITL_SHARE, self.LOST_TOKENS
        budget_s = inf
        task = situation.task
        waited_s = situation.now_s - task.arrival_s
        tightest_s = task.slo.itl_s if waited_s > self.TIGHTER_WAIT_TARGETS * task.slo.ttft_s else 0.0
        for round_ in situation.running:
            if round_.itl_slo_s < tightest_s:
                continue
            target_s = itl_share * round_.itl_slo_s
            spare_s = target_s - step_s
            pause_s = target_s * round_.tokens - round_.elapsed_s - step_s
            if spare_s <= 0.0 or pause_s < -lost_tokens * spare_s:
                continue
            # Without `min`, because this runs for every round of the batch at every pass.
            room_s = pause_s + ahead_tokens * spare_s
            if room_s < budget_s:
                budget_s = room_s
        return budget_s


def _shortest_s(situation: SlicingSituation) -> float:
    return shortest_pass_s(situation.model, situation.task.hist_tokens, situation.parallelism)


def _whole_s(situation: SlicingSituation) -> float:
    task = situation.task
    return situation.model.prefill_s(task.hist_tokens, task.incr_tokens, situation.parallelism)


def _tokens_in(situation: SlicingSituation, seconds: float, whole_s: float) -> int:
    """All that is left if its `whole_s` fit into `seconds`, else `most_tokens`."""
    return situation.task.incr_tokens if whole_s <= seconds else most_tokens(situation, seconds)


def most_tokens(situation: SlicingSituation, seconds: float) -> int:
    """The largest part of an increment that is prefilled in `seconds`, at least one token, to a page's precision."""
    task = situation.task
    return tokens_within(
        seconds,
        task.hist_tokens,
        1,
        task.incr_tokens,
        situation.parallelism,
        situation.model,
        precision_tokens=_PRECISION_TOKENS,
    )
