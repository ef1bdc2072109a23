"""Runs a simulation: `simulate` is the one entry."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ampd.perf.model import PerformanceModel
from ampd.recent_load import RecentLoad
from ampd.serving.kv_tiers import TIERS
from ampd.types import Slo
from planner.simulator.cluster import Cluster
from planner.simulator.coordinators import Coordinators
from planner.simulator.decodes import Decodes
from planner.simulator.events import EventLoop
from planner.simulator.kv_store import KvStore
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.outcome import SimulatedRound, SimulationRun
from planner.simulator.prefills import Prefills
from planner.simulator.roles import RoleKeeper
from planner.simulator.sessions import SessionRunner
from planner.simulator.transfers import KvTransfers
from planner.simulator.views import DelayedViews, FreshViews, Views
from planner.simulator.warm_start import WarmStart
from planner.simulator.worker import SimulatedWorker
from planner.simulator.world import World
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
        load=RecentLoad(policies.pools.load_s) if policies.pools.load_s else None,
    )
    loop = world.loop
    workers = [
        SimulatedWorker(f"{role}-{number}", role, group, world)
        for role, groups in cluster.groups.items()
        for number, group in enumerate(group for group in groups for _ in range(group.replicas))
    ]
    views: Views = FreshViews(workers, loop)
    if options.state_delay_s or options.coordinators > 1:
        views = DelayedViews(workers, loop, options.state_delay_s, options.coordinators)
    roles = {worker.worker_id: worker.role.value for worker in workers}
    runner, coordinators = _connected(world, workers, views, cluster.max_context_tokens, on_round)
    keeper = RoleKeeper(world, workers, views, lambda: runner.sessions_over == len(sessions))
    keeper.start()
    idle = [session_id for session_id, begun in options.under_way.items() if begun.is_idle]
    by_id = {session.session_id: session for session in sessions} if idle else {}
    for session_id in idle:
        runner.wait(by_id[session_id])
    waiting = frozenset(idle)
    loop.at_each(
        runner.arrive, [(session.arrival_s, session) for session in sessions if session.session_id not in waiting]
    )
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
        lost_sessions=sum(worker.resident.evicted for worker in workers),
        role_flips=keeper.role_flips,
        refusals=coordinators.refusals if options.max_wait else None,
        moves=coordinators.moves if options.moves != "never" else None,
        events=loop.handled,
        kv_store=_store_figures(workers),
        timeline=world.spans or [],
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
    with_store = [worker for worker in workers if worker.reloads is not None]
    for worker in with_store:
        assert worker.reloads is not None
        assert isinstance(worker.resident, KvStore)
        hits.update(worker.reloads.hit_tokens)
        evicted.update(worker.resident.evicted_tokens)
        device_evictions += worker.memory.evicted
        reload_s += worker.reloads.reload_s
    if not with_store:
        return None
    return {
        "hit_tokens": dict(hits),
        "evicted_tokens": dict(evicted),
        "device_evictions": device_evictions,
        "reload_s": reload_s,
    }


def _connected(
    world: World,
    workers: Sequence[SimulatedWorker],
    views: Views,
    max_context_tokens: int,
    on_round: Callable[[SimulatedRound], object],
) -> tuple[SessionRunner, Coordinators]:
    """Connect the parts: sessions send rounds to coordinators, these to prefills, these to decodes."""
    transfers = KvTransfers(world)
    warm = WarmStart(world.options.under_way, workers)
    runner = SessionRunner(world, warm.place, lambda session: coordinators.send(session), on_round)
    decodes = Decodes(world, transfers, runner.finish)
    prefills = Prefills(world, transfers, decodes.hand_over, decodes.last_token)
    coordinators = Coordinators(world, workers, views, max_context_tokens, prefills, runner.end)
    return runner, coordinators
