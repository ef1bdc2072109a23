"""Prefills that are not sliced."""

from __future__ import annotations

from ampd.policies.base import SlicingSituation
from ampd.policies.registry import Policy, register


@register("slicing", "whole")
class WholeSlicing(Policy):
    """Run prefills whole; the next step of the decode batch takes as long as they do.

    Reads: nothing but the prefills.

    Limits: a long prefill makes the ITL of every round in the batch late.

    Example: `--slicing whole`
    """

    def slice(self, situation: SlicingSituation) -> int:
        return situation.task.incr_tokens
