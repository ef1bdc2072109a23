"""What a policy is: a pure function of (task, views, model, now, rng), with no clock, I/O or globals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism, PrefillTask, Role, RouteDecision, RunningRound, Slo, WorkerView


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
        together: positions of further tasks that are computed in the same pass.
        wait_s: greater than 0: nothing runs yet; ask again after so many seconds, or when the queue changes.
    """

    index: int
    postponed: tuple[int, ...] = ()
    together: tuple[int, ...] = ()
    wait_s: float = 0.0


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


@dataclass(frozen=True, slots=True)
class Slice:
    """How a local prefill goes on.

    Attributes:
        tokens: what to compute next, at least 1 and at most what is left, unless `wait_s` is greater than 0.
        wait_s: greater than 0: leave the worker to its decode batch for so many seconds, then ask again.
    """

    tokens: int
    wait_s: float = 0.0


class SlicingPolicy(Protocol):
    """Chooses how a prefill on a decode worker shares the worker with the batch that decodes there."""

    def slice(
        self,
        task: PrefillTask,
        running: Sequence[RunningRound],
        parallelism: Parallelism,
        model: PerformanceModel,
        now_s: float,
    ) -> Slice:
        """The next slice of what is left of a prefill: slices that are done are history. `running` may be empty."""
        ...


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A worker that gets another role, or another lane of its role's pool. `reason`: a short stable word."""

    worker_id: str
    role: Role
    reason: str
    lane: str = ""


class PoolsPolicy(Protocol):
    """Chooses the roles of the workers, again and again. A worker finishes what it has after a change."""

    def change(
        self,
        workers: Sequence[WorkerView],
        slo: Slo,
        model: PerformanceModel,
        now_s: float,
        changed_s: float,
        rng: random.Random,
    ) -> Sequence[RoleChange]:
        """The changes that are due. `changed_s`: time of the latest change, minus infinity if there was none."""
        ...
