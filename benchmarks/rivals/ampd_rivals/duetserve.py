"""DuetServe (arXiv 2511.04791): aggregated serving that partitions the GPU where a mixed pass would take too long."""

from __future__ import annotations

from pydantic import Field

from ampd.perf.partition import BANDWIDTH_PER_SHARE, prefill_on_s, step_on_s
from ampd.policies.base import Compute, Slice, SlicingSituation
from ampd.policies.passes import mixed_pass_keeps_itl, tokens_within
from ampd.policies.registry import Policy, register

_UNITS = 60
"""Parts into which the GPU can be divided."""

_LEAST_TOKENS = 16


@register("slicing", "duetserve")
class DuetServe(Policy):
    """Mix prefill and decode in one pass while that keeps the ITL target, else give each of them a part of the GPU.

    After DuetServe (arXiv 2511.04791).

    Reads: history, increment of the prefill; size, context and ITL targets of the running batch; prefill and step times
    of the performance model.

    What the source says: prefill and decode share passes of up to a budget of tokens. A model predicts the time of the
    next pass. If it exceeds the target for the time between tokens, the multiprocessors are divided between prefill and
    decode, which then run beside each other. Of the divisions that keep the target, the one with the highest throughput
    is taken. Waiting prefills come first come first served.

    Rule:

    1. While nothing decodes: the next `budget_tokens`.
    2. The next `budget_tokens`, in one pass with the batch's step, if the pass keeps the strictest ITL target.
    3. Otherwise the least part of the GPU on which the step keeps the target decodes, because prefill has far more
       tokens to win. The prefill gets the rest, and as many tokens as it computes there during the step, at least 16.
       If no part keeps the target, a third of the GPU decodes, which is as fast as all of it.

    Our reading: a prefill on a part of the GPU takes as much longer as it has fewer multiprocessors. A decode step is
    bound by memory, and needs a third of them for the whole bandwidth (`ampd.perf.partition`). The two do not slow each
    other down. This favours DuetServe. The source makes several steps beside a long prefill. Here a prefill is cut so
    that each part takes a step, which costs little where parts have hundreds of tokens.

    Limits: only the simulated engine can mix and partition. In a live graph the batch pauses for the tokens instead.
    One prefill is in a pass at a time, while the source fills the budget with several short ones.

    Example: `--slicing duetserve`, with `ampd simulate --mode colocated --ordering fcfs`
    """

    budget_tokens: int = Field(8192, ge=1, description="Most new tokens of a pass.")

    def slice(self, situation: SlicingSituation) -> Slice:
        task, running, model = situation.task, situation.running, situation.model
        tokens = min(self.budget_tokens, task.incr_tokens)
        if not running:
            return Compute(tokens)
        if mixed_pass_keeps_itl(situation)(tokens):
            return Compute(tokens, decode_share=0.0)
        context_tokens = sum(round_.context_tokens for round_ in running)
        step_s = model.decode_step_s(len(running), context_tokens, situation.parallelism)
        share = _least_share(step_s, min(round_.itl_slo_s for round_ in running))
        whole_gpu_s = step_on_s(step_s, share) / prefill_on_s(1.0, 1.0 - share)
        fitting = tokens_within(whole_gpu_s, task.hist_tokens, 0, tokens + 1, situation.parallelism, model)
        return Compute(min(max(fitting, _LEAST_TOKENS), tokens), decode_share=share)


def _least_share(step_s: float, target_s: float) -> float:
    """The least part of the GPU on which a step keeps the target; the part with all bandwidth if none does."""
    most = 1.0 / BANDWIDTH_PER_SHARE
    shares = (units / _UNITS for units in range(1, _UNITS))
    return next((share for share in shares if share < most and step_on_s(step_s, share) <= target_s), most)
