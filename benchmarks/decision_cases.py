"""The decisions that `benchmarks.decision_time` measures, and the clusters that they are made in."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ampd.perf.presets import load_performance_model
from ampd.policies.base import RoutingSituation
from ampd.policies.estimates import Queue
from ampd.policies.registry import BINDING, ROUTING
from ampd.serving.placement import Moving, PlacementPolicies, PlanSituation
from ampd.state.redis_store import StateStore
from ampd.state.store import TaskDone, TaskQueued, WorkerUpdated
from ampd.state.view import ClusterView
from ampd.types import Parallelism, PrefillTask, Role, Slo, Window, WorkerView
from workers.worker_view import listed

MODEL = load_performance_model("qwen3-32b-h20")
SLO = Slo(ttft_s=1.0, itl_s=0.04)
FREE, FULL = Window(0.01, 20), Window(50.0, 20)
BATCH = 100
"""The largest decode batch under load."""
KV_TOKENS = 1_000_000

BIND, MIXED, PLAN = "bind", "mixed", "plan"


@dataclass(frozen=True, slots=True)
class Case:
    """What is decided.

    Attributes:
        name: a routing policy, or another decision with the default policies: `BIND`, `MIXED` or `PLAN`.
        label: with the way out that the windows lead to.
        ttft: of the prefill workers.
        itl: of the decode worker.
    """

    name: str
    label: str
    ttft: Window = FULL
    itl: Window = FULL


def cases() -> list[Case]:
    """All of them."""
    ways_out = {"ttft-slack": (FREE, FULL), "itl-slack": (FULL, Window(0.001, 20)), "cheapest": (FULL, FULL)}
    result = [Case("ampd", f"ampd/{reason}", *windows) for reason, windows in ways_out.items()]
    others = [*(name for name in ROUTING.names() if name != "ampd"), BIND, MIXED, PLAN]
    return result + [Case(name, name) for name in others]


class NoStore:
    """The local copy is not connected here. It only asks how long ago a command was refused."""

    def refused_ago_s(self) -> float:
        return float("inf")


def make_task(rng: random.Random) -> PrefillTask:
    """A later round of an agent."""
    number = rng.randrange(1 << 30)
    hist, incr = rng.randint(500, 30000), max(16, int(rng.lognormvariate(6, 1.1)))
    return PrefillTask(f"t{number}", f"s{number % 100}", hist, incr, 0.0, SLO)


def make_workers(rng: random.Random, count: int, queue: int, ttft: Window) -> list[WorkerView]:
    """Prefill workers of two parallelisms with `queue` waiting prefills each, a tenth of the sessions held."""
    return [
        WorkerView(
            f"{rng.getrandbits(64):016x}",
            Role.PREFILL,
            Parallelism(rng.choice((2, 4))),
            tuple(make_task(rng) for _ in range(queue)),
            ttft=replace(ttft, mean_s=ttft.mean_s * rng.uniform(0.9, 1.1)),
            max_context_tokens=131072,
            held_tokens={f"s{rng.randrange(100)}": 4000 for _ in range(10)},
        )
        for _ in range(count)
    ]


def under_load(rng: random.Random, worker: WorkerView, queue: int, batch: int = 0) -> WorkerView:
    """The worker with a queue of half to one and a half times `queue`, and a decode batch of up to `batch`."""
    tasks = [
        replace(make_task(rng), arrival_s=-rng.uniform(0, SLO.ttft_s), session_missed=rng.random() < 0.2)
        for _ in range(rng.randint(queue // 2, queue + queue // 2))
    ]
    decoding = rng.randint(0, batch)
    return replace(worker, queue=tuple(tasks), decode_batch=decoding, decode_context_tokens=8000 * decoding)


class Cluster:
    """Workers as a coordinator's local copy has them, with queues that change and keep their length.

    Attributes:
        decode_id: the owner of the sessions.
    """

    def __init__(self, rng: random.Random, case: Case, count: int, queue: int) -> None:
        workers = _workers_of(rng, case, count, queue)
        self.decode_id = workers[-1].worker_id
        self.view = ClusterView(cast(StateStore, NoStore()), lease_s=1e9, clock=lambda: 0.0, model=MODEL)
        self._there: dict[str, list[str]] = {}
        for worker in workers:
            tasks, rest = listed(worker.queue)
            self.view.apply(WorkerUpdated(replace(worker, queue=Queue(tasks), queue_rest=rest), None))
            self._there[worker.worker_id] = [task.task_id for task in tasks]

    def decode(self) -> WorkerView:
        """The owner of the sessions."""
        decode = self.view.worker(self.decode_id)
        assert decode is not None
        return decode

    def change(self, worker_id: str, task: PrefillTask) -> None:
        """A prefill enters at a worker, and its first one ends."""
        there = self._there[worker_id]
        self.view.apply(TaskQueued(worker_id, task))
        there.append(task.task_id)
        self.view.apply(TaskDone(worker_id, there.pop(0)))


def _workers_of(rng: random.Random, case: Case, count: int, queue: int) -> list[WorkerView]:
    """The workers of a case; the last one owns the sessions. It is one of the `count`, unless all others prefill."""
    if case.name in (BIND, MIXED):
        return _owners(rng, Role.MIXED if case.name == MIXED else Role.DECODE, count, queue)
    if case.name == PLAN:
        prefill = [under_load(rng, worker, queue) for worker in make_workers(rng, count - count // 2, queue, FULL)]
        *others, last = _owners(rng, Role.DECODE, count // 2, queue)
        return [*prefill, *others, replace(last, kv_used_tokens=KV_TOKENS)]
    workers = make_workers(rng, count, queue, case.ttft)
    decode = replace(make_workers(rng, 1, queue, case.ttft)[0], role=Role.DECODE, itl=case.itl)
    if "/" in case.label:
        return [*workers, decode]
    workers = [under_load(rng, worker, queue) for worker in workers]
    return [*workers, under_load(rng, replace(decode, itl=Window()), queue, BATCH)]


def _owners(rng: random.Random, role: Role, count: int, queue: int) -> list[WorkerView]:
    """Workers that own sessions, with room in their memories."""
    return [
        replace(
            under_load(rng, worker, queue, BATCH),
            role=role,
            itl=Window(),
            kv_capacity_tokens=KV_TOKENS,
            kv_used_tokens=rng.randint(KV_TOKENS // 10, KV_TOKENS // 2),
        )
        for worker in make_workers(rng, count, queue, FULL)
    ]


Decide = Callable[[Cluster, PrefillTask], tuple[str, str]]
"""Makes a decision: (the worker that gets the prefill, the reason)."""


def decision(case: Case, rng: random.Random) -> Decide:
    """How the case decides. Everything that it reads of the cluster, it asks the local copy for."""
    if case.name in (BIND, MIXED, PLAN):
        placement = PlacementPolicies(BINDING.create("predictive"), ROUTING.create("predictive"), MODEL, rng)
        return {BIND: _bound, MIXED: _routed, PLAN: _planned}[case.name](placement)
    policy = ROUTING.create(case.name)

    def route(cluster: Cluster, task: PrefillTask) -> tuple[str, str]:
        decode, prefill = cluster.decode(), cluster.view.prefill()
        made = policy.route(
            RoutingSituation(task=task, decode=decode, prefill=prefill, model=MODEL, now_s=0.0, rng=rng)
        )
        return made.worker_id, made.reason

    return route


def _bound(placement: PlacementPolicies) -> Decide:
    return lambda cluster, task: (placement.bind(task, cluster.view.decode(), 0.0), BIND)


def _routed(placement: PlacementPolicies) -> Decide:
    def route(cluster: Cluster, task: PrefillTask) -> tuple[str, str]:
        made = placement.route(task, cluster.decode(), cluster.view.prefill(), 0.0)
        return made.worker_id, made.reason

    return route


def _planned(placement: PlacementPolicies) -> Decide:
    def plan(cluster: Cluster, task: PrefillTask) -> tuple[str, str]:
        moving = Moving("needed", cluster.view.decode, task.context_tokens + 1)
        made = placement.plan(
            PlanSituation(
                task=task,
                decode=cluster.decode(),
                prefill=cluster.view.prefill(),
                now_s=0.0,
                shared_tokens=_nothing_shared,
                moving=moving,
            )
        )
        return made.decision.worker_id, made.move_reason or made.decision.reason

    return plan


def _nothing_shared(_: Sequence[WorkerView]) -> dict[str, int]:
    return {}
