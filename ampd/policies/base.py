"""What a policy is: a pure function of (task, views, model, now, rng), with no clock, I/O or globals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism, PrefillTask, RouteDecision, WorkerView


class BindingPolicy(Protocol):
    """Chooses the decode worker that a new session is bound to."""

    def bind(
        self, task: PrefillTask, decode: Sequence[WorkerView], model: PerformanceModel, now_s: float, rng: random.Random
    ) -> str:
        """The chosen worker's id. `decode` is never empty."""
        ...


class RoutingPolicy(Protocol):
    """Chooses where a round's increment is prefilled."""

    def route(
        self,
        task: PrefillTask,
        decode: WorkerView,
        prefill: Sequence[WorkerView],
        model: PerformanceModel,
        now_s: float,
        rng: random.Random,
    ) -> RouteDecision:
        """Decide for a session bound to `decode`. With no prefill worker alive the answer is local."""
        ...


@dataclass(frozen=True, slots=True)
class Pick:
    """The next task of a queue, and the tasks that were postponed by choosing it.

    Attributes:
        index: position in the queue of the task to run.
        postponed: positions of the tasks that it overtakes.
    """

    index: int
    postponed: tuple[int, ...] = ()


class OrderingPolicy(Protocol):
    """Chooses which waiting prefill of a queue runs next."""

    def pick(
        self,
        queue: Sequence[PrefillTask],
        parallelism: Parallelism,
        model: PerformanceModel,
        now_s: float,
        rng: random.Random,
    ) -> Pick:
        """Choose from `queue`, which is in order of arrival and never empty."""
        ...
