"""Our slicing: as much prefill between two decode steps as the ITL target of every running round allows."""

from __future__ import annotations

from math import ceil, inf
from typing import ClassVar

from pydantic import Field

from ampd.policies import expectations
from ampd.policies.base import Compute, Slice, SlicingSituation, Wait
from ampd.policies.passes import shortest_pass_s, tokens_within
from ampd.policies.registry import Policy, register

_PRECISION_TOKENS = 16


@register("slicing", "slack")
class SlackSlicing(Policy):
    """Slice prefills so that they do not push a decoding round over its mean ITL target, as the performance model
    predicts it, and never block a short prefill behind a long one.

    Reads: history and increment of the task, its TTFT target; tokens, time and ITL target of every round that
    decodes here; prefill and step times of the performance model.

    Rule:

    1. A running round has n tokens out, the first of them e seconds ago. It can be paused for `0.92 * itl * n - e -
       step` seconds, and the part of the target that one further step leaves over, and still meet its mean ITL. The
       shortest of these pauses is the budget of the batch. A slice is the most tokens whose prefill fits into it.
    2. A slice takes at least two shortest passes. While the budget is smaller, the batch decodes, but no prefill
       waits for longer than 10 TTFT targets, and after a quarter of its own target none waits for rounds with a
       tighter ITL target than its own.
    3. The batch does not wait for a round whose target is lost: it could make up for its delay only in more than 64
       further tokens, or never.
    4. No slice takes longer than `quantum` of the TTFT target, or than 5 shortest passes if that is more. Between
       two slices the ordering chooses again.

    With `mixes` the batch does not pause. The engine asks for a slice before each pass, and the pass is a step too.
    The budget is then larger by the time of a step without contexts, because a pass reads the weights once. A slice
    has a page at least. Only if not even a tenth of the shortest pass fits, the step comes alone. The ordering
    chooses again after a turn of several passes, which would take as long as 4 allows if they were one.

    Limits: each slice costs the fixed time of a pass. The length of a round is not known, so only one token beyond
    the next is counted on. With `mixes` and a large batch a pass may take half longer than the budget.

    Example: `--slicing slack`
    """

    quantum: float = Field(0.15, gt=0, description="Longest slice, as a share of the TTFT target.")
    mixes: bool = Field(
        False,
        description="A prefill shares its passes with the steps of the batch, which then does not pause "
        "([workers](workers.md#passes-that-are-shared)).",
    )

    ITL_SHARE: ClassVar[float] = expectations.ITL_SHARE
    QUANTUM_PASSES: ClassVar[float] = 5.0
    """Shortest passes that a slice may always take, however tight the TTFT target is."""
    LEAST_PASSES: ClassVar[float] = 2.0
    """Least time of a slice, in shortest passes."""
    LEAST_BESIDE_PASSES: ClassVar[float] = 0.1
    """Least budget for a slice beside a step, in shortest passes. Such a slice has a page at least."""
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

    @property
    def shares_passes(self) -> bool:
        return self.mixes

    def turn(self, situation: SlicingSituation) -> int:
        return _tokens_in(situation, self._longest_s(situation, _shortest_s(situation)), _whole_s(situation))

    def slice(self, situation: SlicingSituation) -> Slice:
        return self._beside_step(situation) if self.mixes else self._between_steps(situation)

    def _between_steps(self, situation: SlicingSituation) -> Slice:
        shortest_s, whole_s = _shortest_s(situation), _whole_s(situation)
        budget_s, gain_s, step_s = self._budget(situation, self.AHEAD_TOKENS)
        needed_s = min(self.LEAST_PASSES * shortest_s, whole_s)
        if budget_s < needed_s and self._may_wait(situation):
            # Never for longer than for a lost round: the gain of a step may be next to nothing, and batches change.
            steps = min(ceil((needed_s - budget_s) / gain_s), self.LOST_TOKENS)
            # Half a step early, because a prefill that is submitted during a step runs after it.
            return Wait((steps - 0.5) * step_s)
        allowed_s = max(min(budget_s, self._longest_s(situation, shortest_s)), needed_s)
        return Compute(_tokens_in(situation, allowed_s, whole_s))

    def _beside_step(self, situation: SlicingSituation) -> Slice:
        budget_s, _, step_s = self._budget(situation, 0.0)
        # The step reads the weights too. That its rows are tokens of the pass is not counted: see the docstring.
        budget_s += situation.model.decode_step_s(len(situation.running), 0, situation.parallelism)
        if budget_s < self.LEAST_BESIDE_PASSES * _shortest_s(situation) and self._may_wait(situation):
            return Wait(step_s)
        return Compute(_tokens_in(situation, budget_s, _whole_s(situation)))

    def _longest_s(self, situation: SlicingSituation, shortest_s: float) -> float:
        return max(self.quantum * situation.task.slo.ttft_s, self.QUANTUM_PASSES * shortest_s)

    def _may_wait(self, situation: SlicingSituation) -> bool:
        task = situation.task
        most_wait_s = min(self.MOST_WAIT_TARGETS * task.slo.ttft_s, self.MOST_WAIT_S)
        return situation.now_s - task.arrival_s < most_wait_s

    def _budget(self, situation: SlicingSituation, ahead_tokens: float) -> tuple[float, float, float]:
        """(seconds that the batch can be paused now, what every step adds, seconds of a step)."""
        running = situation.running
        context_tokens = sum([round_.context_tokens for round_ in running])
        step_s = situation.model.decode_step_s(len(running), context_tokens, situation.parallelism)
        itl_share, lost_tokens = self.ITL_SHARE, self.LOST_TOKENS
        budget_s, gain_s = inf, inf
        task = situation.task
        waited_s = situation.now_s - task.arrival_s
        tightest_s = task.slo.itl_s if waited_s > self.TIGHTER_WAIT_TARGETS * task.slo.ttft_s else 0.0
        for round_ in running:
            if round_.itl_slo_s < tightest_s:
                continue
            target_s = itl_share * round_.itl_slo_s
            spare_s = target_s - step_s
            pause_s = target_s * round_.tokens - round_.elapsed_s - step_s
            if spare_s <= 0.0 or pause_s < -lost_tokens * spare_s:
                continue
            # Without `min`, because this runs for every round of the batch at every slice.
            room_s = pause_s + ahead_tokens * spare_s
            if room_s < budget_s:
                budget_s = room_s
            if spare_s < gain_s:
                gain_s = spare_s
        return budget_s, gain_s, step_s


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
