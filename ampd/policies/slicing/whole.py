"""Slicing policies: how a prefill on a decode worker shares the worker with the batch that decodes there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ampd.perf.model import PerformanceModel
from ampd.policies.base import Slice
from ampd.policies.registry import Policy, register
from ampd.types import Parallelism, PrefillTask, RunningRound


@register("slicing", "whole")
class WholeSlicing(Policy):
    """Run a local prefill whole; the decode batch pauses for as long as it takes.

    Reads: nothing but the task.

    Limits: a long prefill makes the ITL of everybody in the batch late.

    Example: `--slicing whole`
    """

    is_whole: ClassVar[bool] = True

    def slice(
        self,
        task: PrefillTask,
        running: Sequence[RunningRound],  # noqa: ARG002
        parallelism: Parallelism,  # noqa: ARG002
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
    ) -> Slice:
        """All of it."""
        return Slice(task.incr_tokens)
