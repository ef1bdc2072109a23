"""What a policy is: a pure function of one situation, with no clock, I/O or globals.

There are five kinds. Each has its own `Situation`: everything that a decision may depend on, by name. A new input
becomes a new field, so that policies written before it stay valid. Policies read a situation and never change it, but
for the `offers` of a route, which only save time.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism, PrefillTask, Role, RouteDecision, RunningRound, Slo, WorkerView

# -- Policies as people write them: `ampd`, `ampd(alpha=0.8)`, and lists of these.

_NAMED = re.compile(r"\s*([A-Za-z0-9_-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_COMMA_OUTSIDE = re.compile(r",(?![^()]*\))")


def split_names(text: str) -> list[str]:
    """The parts of a comma-separated list; commas in parentheses belong to a part."""
    return [part.strip() for part in _COMMA_OUTSIDE.split(text) if part.strip()]


def parse_named(text: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of `name` or `name(key=value, ...)`; values are JSON, or words.

    Raises:
        UserError: the text has another form.
    """
    match = _NAMED.fullmatch(text)
    if match is None:
        raise UserError(f"a policy is written as NAME or NAME(parameter=value, ...) (given: {text!r})")
    parameters: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        key, sign, value = part.partition("=")
        if not sign:
            raise UserError(f"policy {match[1]}: give parameters as name=value (given: {part!r})")
        parameters[key.strip()] = _value(value.strip())
    return match[1], parameters


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# -- Random choices.

OptionT = TypeVar("OptionT")


def any_of(options: Sequence[OptionT], rng: random.Random) -> OptionT:
    """One of some options, each with the same chance.

    It is the one that `rng.choice` gives in Python 3.11 to 3.14, where that is an interpreted function.

    Args:
        options: not empty.
    """
    bits = len(options).bit_length()
    place = rng.getrandbits(bits)
    while place >= len(options):
        place = rng.getrandbits(bits)
    return options[place]


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
