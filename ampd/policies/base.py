"""What a policy is: a pure function of one situation, with no clock, I/O or globals.

There are five kinds. Each has its own `Situation`: everything that a decision may depend on, by name. A new input
becomes a new field, so that policies written before it stay valid. Policies read a situation and never change it, but
for the `offers` of a route, which only save time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism, PrefillTask, Role, RouteDecision, RunningRound, Slo, WorkerView

# Not frozen: a situation is made for every decision, and a frozen dataclass takes twice as long to make.


@dataclass(slots=True, kw_only=True)
class Situation:
    """What all kinds of decisions may depend on.

    Attributes:
        model: predicts the times of prefills, decode steps and KV transfers.
        now_s: the time, on the clock of the tasks' `arrival_s`.
    """

    model: PerformanceModel
    now_s: float


@dataclass(slots=True, kw_only=True)
class BindingSituation(Situation):
    """A new session needs a decode worker.

    Attributes:
        task: the prefill of its first round.
        decode: the decode workers to choose from; never empty.
        rng: the only source of chance.
        shared_tokens: worker id -> tokens of the prompt's beginning that the worker holds for other sessions.
    """

    task: PrefillTask
    decode: Sequence[WorkerView]
    rng: random.Random
    shared_tokens: Mapping[str, int] = field(default_factory=dict)


class BindingPolicy(Protocol):
    """Chooses the decode worker that a new session is bound to."""

    def bind(self, situation: BindingSituation) -> str:
        """The id of the chosen worker."""
        ...


@dataclass(slots=True, kw_only=True)
class RoutingSituation(Situation):
    """A round has to be prefilled somewhere.

    Attributes:
        decode: the worker that its session is bound to.
        prefill: the prefill workers that are alive; may be empty.
        rng: the only source of chance.
        holder: the worker that holds the history, if the session has just moved away from it; None: `decode` does.
        shared_tokens: worker id -> tokens of the prompt's beginning that the worker holds for other sessions. The
            task's history includes such tokens of the session's own worker.
        offers: worker id -> what the policy has predicted for the round at a prefill worker. A policy may fill it, and
            finds it again when the same round is routed under another owner. None: it will not be.
    """

    task: PrefillTask
    decode: WorkerView
    prefill: Sequence[WorkerView]
    rng: random.Random
    holder: WorkerView | None = None
    shared_tokens: Mapping[str, int] = field(default_factory=dict)
    offers: dict[str, Any] | None = None


class RoutingPolicy(Protocol):
    """Chooses where a round's increment is prefilled."""

    def route(self, situation: RoutingSituation) -> RouteDecision:
        """The route of one round. With no prefill worker alive it is local."""
        ...


@dataclass(slots=True, kw_only=True)
class OrderingSituation(Situation):
    """A worker has room for another prefill.

    Attributes:
        queue: the waiting prefills in order of arrival; never empty.
        parallelism: of the worker.
        rng: the only source of chance.
    """

    queue: Sequence[PrefillTask]
    parallelism: Parallelism
    rng: random.Random


@dataclass(frozen=True, slots=True)
class Run:
    """Run a prefill of the queue now.

    Attributes:
        index: its position in the queue.
        postponed: positions of the prefills that it overtakes.
        together: positions of further prefills to compute in the same pass.
    """

    index: int
    postponed: tuple[int, ...] = ()
    together: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing yet; ask again after `wait_s` seconds (greater than 0), or earlier when something changes."""

    wait_s: float


Pick = Run | Wait
"""An ordering's answer."""


class OrderingPolicy(Protocol):
    """Chooses which waiting prefill of a queue runs next."""

    def pick(self, situation: OrderingSituation) -> Pick:
        """The prefill to run next, or how long to wait for a better choice."""
        ...


@dataclass(slots=True, kw_only=True)
class SlicingSituation(Situation):
    """The engine of a worker is about to begin a pass, and has prefills.

    Attributes:
        task: all that the engine has to prefill, as one prefill behind the history of the oldest.
        running: the rounds that decode on the worker; may be empty.
        parallelism, role: of the worker.
    """

    task: PrefillTask
    running: Sequence[RunningRound]
    parallelism: Parallelism
    role: Role = Role.DECODE


class SlicingPolicy(Protocol):
    """Chooses what the engine of a worker computes next: prefills, a step of the batch that decodes there, or both."""

    def slice(self, situation: SlicingSituation) -> int:
        """Tokens that the next pass prefills; 0: it is a step of the batch alone.

        The pass is a step too (a mixed pass) if that is predicted to save time. Otherwise the batch pauses for it, and
        makes a step before the next one.
        """
        ...


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A worker that gets another role or label. `reason`: a short stable word."""

    worker_id: str
    role: Role
    reason: str
    label: str = ""


@dataclass(slots=True, kw_only=True)
class PoolsSituation(Situation):
    """The roles of the workers are under review, as they are several times per second.

    Attributes:
        workers: all workers that are alive.
        slo: the default targets of a round.
        changed_s: time of the latest change of a role; minus infinity if there was none.
        rng: the only source of chance.
    """

    workers: Sequence[WorkerView]
    slo: Slo
    changed_s: float
    rng: random.Random

    def changed_within(self, seconds: float) -> bool:
        """Whether the latest change of a role is less than this long ago."""
        return self.now_s - self.changed_s < seconds


class PoolsPolicy(Protocol):
    """Chooses the roles of the workers. A worker finishes what it has after a change.

    Attributes:
        is_idle: the policy never changes a role. Callers then do not ask it.
    """

    @property
    def is_idle(self) -> bool: ...

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        """The changes that are due."""
        ...
