"""Runs a simulation: `simulate` is the one entry."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ampd.perf.model import PerformanceModel
from ampd.serving.kv_tiers import TIERS
from ampd.types import Slo
from planner.simulator.coordinators import Coordinators, RoleKeeper
from planner.simulator.options import Cluster, EventLoop, Policies, SimulationOptions, World
from planner.simulator.outcome import SimulatedRound, SimulationRun
from planner.simulator.rounds import Rounds
from planner.simulator.sessions import SessionRunner
from planner.simulator.worker import DelayedViews, SimulatedWorker, Views
from workloads.trace import Session

_DEFAULTS = SimulationOptions()
_OBJECTS_PER_COLLECTION = 1_000_000
"""New objects until Python looks for cycles. A simulation makes many objects and hardly any cycle."""


def simulate(
    sessions: Sequence[Session],
    cluster: Cluster,
    model: PerformanceModel,
    policies: Policies,
    slo: Slo,
    options: SimulationOptions = _DEFAULTS,
    on_round: Callable[[SimulatedRound], object] = lambda _: None,
    belief: PerformanceModel | None = None,
) -> SimulationRun:
    """Serve all sessions on a cluster in virtual time.

    Args:
        model: the times of everything that happens.
        on_round: called after each finished round. What it raises ends the simulation.
        belief: the times that the policies predict with; default: `model`.
    """
    world = World(
        loop=EventLoop(),
        model=model,
        belief=belief or model,
        policies=policies,
        slo=slo,
        options=options,
        gaps=[],
        spans=[] if options.keeps_timeline else None,
    )
    loop = world.loop
    workers: list[SimulatedWorker] = []
    gpus = 0
    for role, groups in cluster.groups.items():
        for number, replica in enumerate(group for group in groups for _ in range(group.replicas)):
            host = str(gpus // options.gpus_per_host) if options.gpus_per_host else ""
            workers.append(SimulatedWorker(f"{role}-{number}", role, replica, world, host))
            gpus += replica.parallelism.tp
    views = Views(workers, loop)
    if options.state_delay_s or options.coordinators > 1:
        views = DelayedViews(workers, loop, options.state_delay_s, options.coordinators)
    roles = {worker.worker_id: worker.role.value for worker in workers}
    runner = SessionRunner(world, workers, lambda session: coordinators.send(session), on_round)
    rounds = Rounds(world, runner.finish)
    coordinators = Coordinators(world, workers, views, cluster.max_context_tokens, rounds, runner.end)
    keeper = RoleKeeper(world, workers, views, lambda: runner.sessions_over == len(sessions))
    keeper.start()
    coming = {session.session_id: session for session in sessions}
    for session_id in options.idle_tokens:
        runner.wait(coming.pop(session_id))
    for session in coming.values():
        loop.at(session.arrival_s, runner.arrive, session)
    if options.gaps_from_s:
        loop.at(options.gaps_from_s, lambda _: world.gaps.clear())
    with _rare_collections():
        loop.run(options.until_s)
    return SimulationRun(
        rounds=runner.finished,
        rounds_planned={session.session_id: len(session.rounds) for session in sessions},
        gaps=world.gaps,
        worker_roles=roles,
        duration_s=max(
            (record.sent_s + record.e2e_s for record in runner.finished if record.e2e_s is not None), default=0.0
        ),
        lost_sessions=sum(worker.memory.resident.evicted for worker in workers),
        role_flips=keeper.role_flips,
        refusals=coordinators.refusals if options.max_wait else None,
        moves=coordinators.moves if options.moves != "never" else None,
        events=loop.handled,
        kv_store=_store_figures(workers),
        timeline=world.spans or [],
        busy_s={worker.worker_id: worker.engine.busy_s for worker in workers},
    )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Python's search for cycles takes a sixth of a simulation's time at the usual threshold."""
    usual = gc.get_threshold()
    gc.set_threshold(max(usual[0], _OBJECTS_PER_COLLECTION) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _store_figures(workers: Sequence[SimulatedWorker]) -> dict[str, Any] | None:
    """The figures of all workers with a KV store together; None: there are none."""
    hits, evicted, device_evictions, reload_s = Counter[str](dict.fromkeys(TIERS, 0)), Counter[str](), 0, 0.0
    stores = [store for worker in workers if (store := worker.memory.store) is not None]
    if not stores:
        return None
    for worker in workers:
        if worker.reloads is not None:
            hits.update(worker.reloads.hit_tokens)
            device_evictions += worker.memory.evicted
            reload_s += worker.reloads.reload_s
    for store in stores:
        evicted.update(store.evicted_tokens)
    return {
        "hit_tokens": dict(hits),
        "evicted_tokens": dict(evicted),
        "device_evictions": device_evictions,
        "reload_s": reload_s,
    }
