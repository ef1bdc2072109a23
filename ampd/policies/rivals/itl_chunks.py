"""Slices that fit between two decode steps within the ITL target (the schedule of arXiv 2607.02043)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.base import Slice
from ampd.policies.chunks import largest_chunk_tokens
from ampd.policies.registry import Policy, register
from ampd.types import Parallelism, PrefillTask, RunningRound


@register("slicing", "itl-chunks")
class ItlChunks(Policy):
    """Cut a local prefill so that every pause of the decode batch, and the step after it, stay within the ITL target.

    Reads: history, increment and progress of the prefill; size, context and ITL targets of the running batch; prefill
    and step times of the performance model.

    Rule: between two decode steps, the most tokens whose modelled prefill time fits into the strictest ITL target of
    the batch less the modelled time of its next step; at least `floor_tokens`. While nothing decodes: all that is left.

    Limits: strict step by step. ITL that a round has saved before is not spent, so a prefill takes longer than the
    batch's mean ITL would allow, and pays the fixed cost of a pass for every slice. Where the room is below
    `floor_tokens`, ITL is late by the rest.

    Example: `--slicing itl-chunks`
    """

    floor_tokens: int = Field(16, ge=1, description="Computed between two steps even if that makes the step late.")

    def slice(
        self,
        task: PrefillTask,
        running: Sequence[RunningRound],
        parallelism: Parallelism,
        model: PerformanceModel,
        now_s: float,  # noqa: ARG002
    ) -> Slice:
        """What fits between two steps."""
        left_tokens = task.incr_tokens
        if not running:
            return Slice(left_tokens)
        context_tokens = sum(one.context_tokens for one in running)
        room_s = min(one.itl_slo_s for one in running) - model.decode_step_s(len(running), context_tokens, parallelism)
        tokens = largest_chunk_tokens(task.hist_tokens, left_tokens, room_s, parallelism, model)
        return Slice(min(max(tokens, self.floor_tokens), left_tokens))
