"""Runs a simulation: `simulate` is the one entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampd.perf.model import PerformanceModel
from ampd.types import Role, Slo
from planner.simulator.cluster import Cluster
from planner.simulator.events import EventLoop
from planner.simulator.links import Links
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.outcome import GapRun, SimulationRun, Span
from planner.simulator.roles import RoleKeeper
from planner.simulator.rounds import RoundRunner
from planner.simulator.views import DelayedViews, FreshViews, Views
from planner.simulator.worker import SimulatedWorker
from workloads.trace import Session

_DEFAULTS = SimulationOptions()


def simulate(
    sessions: Sequence[Session],
    cluster: Cluster,
    model: PerformanceModel,
    policies: Policies,
    slo: Slo,
    options: SimulationOptions = _DEFAULTS,
    on_round: Callable[[], None] = lambda: None,
    belief: PerformanceModel | None = None,
) -> SimulationRun:
    """Serve all sessions on a cluster in virtual time.

    `on_round` is called after each finished round, for progress. `belief`: what the policies take for the truth;
    default: `model`, by which everything happens.
    """
    belief = belief or model
    loop = EventLoop()
    gaps: list[GapRun] = []
    spans: list[Span] | None = [] if options.keeps_timeline else None
    workers = [
        SimulatedWorker(f"{role}-{number}", role, group, model, policies.ordering, loop, options, gaps, spans, belief)
        for role, groups in ((Role.PREFILL, cluster.prefill), (Role.DECODE, cluster.decode))
        for number, group in enumerate(group for group in groups for _ in range(group.replicas))
    ]
    views: Views = FreshViews(workers, loop)
    if options.state_delay_s or options.coordinators > 1:
        views = DelayedViews(workers, loop, options.state_delay_s, options.coordinators)
    runner = RoundRunner(
        workers,
        views,
        Links(loop),
        loop,
        model,
        policies,
        slo,
        options,
        spans,
        on_round,
        cluster.max_context_tokens,
        belief,
    )
    roles = {worker.worker_id: worker.role.value for worker in workers}
    keeper = RoleKeeper(
        workers, views, policies.pools, belief, slo, loop, options, lambda: runner.sessions_over == len(sessions)
    )
    keeper.start()
    for session in sessions:
        loop.at(session.arrival_s, runner.arrive, session)
    loop.run()
    return SimulationRun(
        rounds=runner.finished,
        rounds_planned={session.session_id: len(session.rounds) for session in sessions},
        gaps=gaps,
        worker_roles=roles,
        duration_s=max((one.sent_s + one.e2e_s for one in runner.finished if one.e2e_s is not None), default=0.0),
        lost_sessions=sum(worker.memory.evicted for worker in workers if worker.has_decoded),
        role_flips=keeper.role_flips,
        events=loop.handled,
        timeline=spans or [],
    )
