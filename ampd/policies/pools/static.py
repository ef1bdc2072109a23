"""Pools policies: which role each worker has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from ampd.perf.model import PerformanceModel
from ampd.policies.base import RoleChange
from ampd.policies.registry import Policy, register
from ampd.types import Slo, WorkerView


@register("pools", "static")
class StaticPools(Policy):
    """Leave every worker in the role that it was started with.

    Reads: nothing.

    Limits: a cluster whose load shifts between prefill and decode keeps the layout it was planned with.

    Example: `--pools static`
    """

    is_idle: ClassVar[bool] = True

    def change(
        self,
        workers: Sequence[WorkerView],  # noqa: ARG002
        slo: Slo,  # noqa: ARG002
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        changed_s: float,  # noqa: ARG002
        rng: random.Random,  # noqa: ARG002
    ) -> Sequence[RoleChange]:
        """Nothing."""
        return ()
