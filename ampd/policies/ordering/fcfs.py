"""First come, first served."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ampd.perf.model import PerformanceModel
from ampd.policies.base import Pick
from ampd.policies.registry import Policy, register
from ampd.types import Parallelism, PrefillTask

_HEAD = Pick(0)


@register("ordering", "fcfs")
class Fcfs(Policy):
    """Run prefills in order of arrival.

    Reads: nothing but the order of the queue.

    Limits: one long prefill makes everything behind it late.

    Example: `--ordering fcfs`
    """

    def pick(
        self,
        queue: Sequence[PrefillTask],  # noqa: ARG002
        parallelism: Parallelism,  # noqa: ARG002
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        rng: random.Random,  # noqa: ARG002
    ) -> Pick:
        """The head of the queue."""
        return _HEAD
