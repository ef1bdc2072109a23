"""Slices that fit between two decode steps within the ITL target: the schedule of the routing `deflection`."""

from __future__ import annotations

from ampd.policies.base import SlicingSituation
from ampd.policies.registry import Policy, register
from ampd_rivals.deflection.chunks import FLOOR_TOKENS, largest_chunk_tokens


@register("slicing", "itl-chunks")
class ItlChunks(Policy):
    """Cut a local prefill so that every pause of the decode batch, and the step after it, stay within the ITL target.

    After arXiv 2607.02043.

    Reads: history, increment and progress of the prefill; size, context and ITL targets of the running batch; prefill
    and step times of the performance model.

    Rule: between two decode steps, the most tokens whose modelled prefill time fits into the strictest ITL target of
    the batch less the modelled time of its next step; at least 16. While nothing decodes: all that is left.

    Limits: strict step by step. ITL that a round has saved before is not spent, so a prefill takes longer than the
    batch's mean ITL would allow, and pays the fixed cost of a pass for every slice. Where the room is below
    16 tokens, ITL is late by the difference. The slices have the same sizes where they share their passes with steps,
    although such a pass is shorter than a prefill and a step.

    Example: `--slicing itl-chunks`
    """

    def slice(self, situation: SlicingSituation) -> int:
        task, running, model, parallelism = situation.task, situation.running, situation.model, situation.parallelism
        if not running:
            return task.incr_tokens
        context_tokens = sum(round_.context_tokens for round_ in running)
        step_s = model.decode_step_s(len(running), context_tokens, parallelism)
        room_s = min(round_.itl_slo_s for round_ in running) - step_s
        tokens = largest_chunk_tokens(task.hist_tokens, task.incr_tokens, room_s, parallelism, model)
        return min(max(tokens, FLOOR_TOKENS), task.incr_tokens)
