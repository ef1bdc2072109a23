"""Runs a simulation: `simulate` is the one entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampd.perf.model import PerformanceModel
from ampd.types import Slo
from planner.simulator.cluster import Cluster
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.outcome import SimulationRun
from workloads.trace import Session


def simulate(
    sessions: Sequence[Session],
    cluster: Cluster,
    model: PerformanceModel,
    policies: Policies,
    slo: Slo,
    options: SimulationOptions = SimulationOptions(),  # noqa: B008
    on_round: Callable[[], None] | None = None,
) -> SimulationRun:
    """Serve all sessions on a cluster in virtual time.

    `on_round` is called after each finished round, for progress.
    """
    raise NotImplementedError
