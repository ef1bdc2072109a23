"""Asks policies by position: a test gives the inputs that it varies, and the situation is made here."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ampd.perf.model import PerformanceModel
from ampd.policies.base import (
    BindingPolicy,
    BindingSituation,
    OrderingPolicy,
    OrderingSituation,
    Pick,
    PoolsPolicy,
    PoolsSituation,
    RoleChange,
    RoutingPolicy,
    RoutingSituation,
    SlicingPolicy,
    SlicingSituation,
)
from ampd.policies.registry import Policy
from ampd.types import Parallelism, PrefillTask, RouteDecision, RunningRound, Slo, WorkerView

PolicyT = TypeVar("PolicyT", bound=Policy)
_NONE: Mapping[str, int] = {}


def bind(
    policy: BindingPolicy,
    task: PrefillTask,
    decode: Sequence[WorkerView],
    model: PerformanceModel,
    now_s: float,
    rng: random.Random,
    shared_tokens: Mapping[str, int] = _NONE,
) -> str:
    return policy.bind(
        BindingSituation(task=task, decode=decode, model=model, now_s=now_s, rng=rng, shared_tokens=shared_tokens)
    )


def route(
    policy: RoutingPolicy,
    task: PrefillTask,
    decode: WorkerView,
    prefill: Sequence[WorkerView],
    model: PerformanceModel,
    now_s: float,
    rng: random.Random,
    shared_tokens: Mapping[str, int] = _NONE,
) -> RouteDecision:
    return policy.route(
        RoutingSituation(
            task=task,
            decode=decode,
            prefill=prefill,
            model=model,
            now_s=now_s,
            rng=rng,
            shared_tokens=shared_tokens,
        )
    )


def pick(
    policy: OrderingPolicy,
    queue: Sequence[PrefillTask],
    parallelism: Parallelism,
    model: PerformanceModel,
    now_s: float,
    rng: random.Random,
) -> Pick:
    return policy.pick(OrderingSituation(queue=queue, parallelism=parallelism, model=model, now_s=now_s, rng=rng))


def slice(
    policy: SlicingPolicy,
    task: PrefillTask,
    running: Sequence[RunningRound],
    parallelism: Parallelism,
    model: PerformanceModel,
    now_s: float,
) -> int:
    return policy.slice(SlicingSituation(task=task, running=running, parallelism=parallelism, model=model, now_s=now_s))


def change(
    policy: PoolsPolicy,
    workers: Sequence[WorkerView],
    slo: Slo,
    model: PerformanceModel,
    now_s: float,
    changed_s: float,
    rng: random.Random,
) -> Sequence[RoleChange]:
    return policy.change(
        PoolsSituation(workers=workers, slo=slo, model=model, now_s=now_s, changed_s=changed_s, rng=rng)
    )


def with_constants(policy: PolicyT, **constants: Any) -> PolicyT:
    """A policy of the same parameters whose class has other constants."""
    known = type(policy)
    assert constants.keys() <= vars(known).keys() | vars(known.__base__).keys()
    made: type[PolicyT] = type(known.__name__, (known,), {"__module__": known.__module__, **constants})
    return made(**policy.model_dump())
