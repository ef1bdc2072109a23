"""DynaServe's local scheduling: passes of prefill and decode that keep the ITL target."""

from __future__ import annotations

from ampd.policies.base import Compute, Slice, SlicingSituation
from ampd.policies.passes import mixed_pass_keeps_itl
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

    Limits: only the simulated engine mixes. In a live graph the batch pauses for the tokens instead. One prefill is in
    a pass at a time.

    Example: `--slicing dynaserve`, with `--routing dynaserve`
    """

    def slice(self, situation: SlicingSituation) -> Slice:
        task = situation.task
        if not situation.running:
            return Compute(task.incr_tokens)
        keeps = mixed_pass_keeps_itl(situation)
        if keeps(task.incr_tokens):
            return Compute(task.incr_tokens, decode_share=0.0)
        fits, exceeds = 0, task.incr_tokens
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            if keeps(middle):
                fits = middle
            else:
                exceeds = middle
        return Compute(min(max(fits, _LEAST_TOKENS), task.incr_tokens), decode_share=0.0)
