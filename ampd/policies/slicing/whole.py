"""Prefills that are not sliced."""

from __future__ import annotations

from typing import ClassVar

from ampd.policies.base import Compute, Slice, SlicingSituation
from ampd.policies.registry import Policy, register


@register("slicing", "whole")
class WholeSlicing(Policy):
    """Run a local prefill whole; the decode batch pauses for as long as it takes.

    Reads: nothing but the task.

    Limits: a long prefill makes the ITL of every round in the batch late.

    Example: `--slicing whole`
    """

    is_whole: ClassVar[bool] = True

    def slice(self, situation: SlicingSituation) -> Slice:
        return Compute(situation.task.incr_tokens)
