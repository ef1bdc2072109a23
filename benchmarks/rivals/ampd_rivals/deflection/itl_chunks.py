"""Slices that fit between two decode steps within the ITL target: the schedule of the routing `deflection`."""

from __future__ import annotations

from pydantic import Field

from ampd.policies.base import Compute, Slice, SlicingSituation
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
    16 tokens, ITL is late by the difference. With `mixes` the slices have the same sizes, although a shared pass is
    shorter than a prefill and a step. Only the simulated engine mixes. In a live graph the batch pauses.

    Example: `--slicing itl-chunks`
    """

    mixes: bool = Field(False, description="A slice shares its pass with a step of the batch, which does not pause.")

    def slice(self, situation: SlicingSituation) -> Slice:
        task, running, model, parallelism = situation.task, situation.running, situation.model, situation.parallelism
        if not running:
            return Compute(task.incr_tokens)
        context_tokens = sum(round_.context_tokens for round_ in running)
        step_s = model.decode_step_s(len(running), context_tokens, parallelism)
        room_s = min(round_.itl_slo_s for round_ in running) - step_s
        tokens = largest_chunk_tokens(task.hist_tokens, task.incr_tokens, room_s, parallelism, model)
        return Compute(min(max(tokens, FLOOR_TOKENS), task.incr_tokens), mixes=self.mixes)
