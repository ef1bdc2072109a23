"""DynaServe (arXiv 2504.09285): passes of prefill and decode that keep the ITL target.

Its split of a request between two workers is left out: no worker here computes a part of a prompt for another one.
"""

from __future__ import annotations

from ampd.policies.base import SlicingSituation
from ampd.policies.registry import Policy, register

_LEAST_TOKENS = 16


@register("slicing", "dynaserve")
class DynaServeSlicing(Policy):
    """Add as many prefill tokens to the batch's next step as its ITL target allows.

    After DynaServe (arXiv 2504.09285), its local scheduling.

    Reads: history, increment of the prefill; size, context and ITL targets of the running batch; prefill and step times
    of the performance model.

    What the source says: each worker forms passes of decode and prefill tokens. A table of measured times bounds the
    prefill tokens so that a pass keeps the target for the time between tokens.

    Rule: the most tokens whose pass, with the batch's step in it, keeps the strictest ITL target of the batch; at least
    16. While nothing decodes: all that is left.

    Limits: where mixed passes save nothing, the batch pauses for the tokens instead.

    Example: `--slicing dynaserve`
    """

    def slice(self, situation: SlicingSituation) -> int:
        task = situation.task
        if not situation.running:
            return task.incr_tokens
        context_tokens = sum(round_.context_tokens for round_ in situation.running)
        target_s = min(round_.itl_slo_s for round_ in situation.running)

        def keeps(tokens: int) -> bool:
            parts, batch = [(task.hist_tokens, tokens)], len(situation.running)
            return situation.model.mixed_pass_s(parts, batch, context_tokens, situation.parallelism) <= target_s

        if keeps(task.incr_tokens):
            return task.incr_tokens
        fits, exceeds = 0, task.incr_tokens
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            if keeps(middle):
                fits = middle
            else:
                exceeds = middle
        return min(max(fits, _LEAST_TOKENS), task.incr_tokens)
