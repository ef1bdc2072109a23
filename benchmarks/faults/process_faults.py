"""Faults of whole processes: killed, stopped, replaced one after the other."""

from __future__ import annotations

import asyncio
import signal

from benchmarks.faults.cluster import KINDS, LEASE_S, PREFILL_S, PREFILL_S_PER_TOKEN
from benchmarks.faults.fault import DEATH_AIM_S, Action, Fault, Scene
from benchmarks.faults.foreign_workers import check_weights, note_weights
from benchmarks.faults.moments import HISTORY_TOKENS, INCREMENT_TOKENS
from benchmarks.faults.weights import other_weights

_GROUP = "Processes"
STOPPED_S = 2.5 * LEASE_S

_LOST_AIM_S = round(4 / 3 * LEASE_S + 0.1 + PREFILL_S + PREFILL_S_PER_TOKEN * (HISTORY_TOKENS + INCREMENT_TOKENS), 1)
"""A worker that hangs: the end of its lease, the next sign of life of another worker (each publishes three times per
lease), the next look of the guard, and the computation of the victim's whole context."""

_WOKEN_AIM_S = STOPPED_S + 1.0
"""A coordinator or frontend that hangs is noticed by the liveness probe only, which the harness does not make."""


def _signals(kind: str, number: signal.Signals) -> Action:
    async def act(scene: Scene) -> None:
        scene.processes[kind].signal(number)

    return act


def _kills(kind: str) -> Action:
    async def act(scene: Scene) -> None:
        scene.to_end(kind).signal(signal.SIGKILL)

    return act


async def _restart_workers(scene: Scene) -> None:
    """Replace each worker by a new one, which serves before the old one gets SIGTERM."""

    async def run() -> None:
        graph = scene.graph
        for kind in ("prefill", "decode"):
            for member in graph.of(kind):
                started = await graph.started(kind)
                note_weights(scene, [started])
                await graph.end(member, signal.SIGTERM)

    scene.running.append(asyncio.create_task(run()))


async def _update_weights(scene: Scene) -> None:
    """Replace each worker by one with other weights. The next update goes back to the first ones."""
    graph = scene.graph
    note_weights(scene, graph.workers)
    other = other_weights(graph.model, graph.folder)
    graph.worker_model = other if graph.worker_model == graph.model else graph.model
    await _restart_workers(scene)


async def _until_restarted(scene: Scene) -> None:
    await asyncio.gather(*scene.running)


PROCESS_FAULTS = [
    *(
        Fault(f"kill-{kind}", _GROUP, f"SIGKILL of the {kind} process of the round", _kills(kind), aim_s=DEATH_AIM_S)
        for kind in KINDS
    ),
    *(
        Fault(
            f"stop-{kind}",
            _GROUP,
            f"SIGSTOP of the {kind} process of the round, SIGCONT after {STOPPED_S:g} s",
            _signals(kind, signal.SIGSTOP),
            _signals(kind, signal.SIGCONT),
            holds_s=STOPPED_S,
            aim_s=_LOST_AIM_S if kind in ("prefill", "decode") else _WOKEN_AIM_S,
        )
        for kind in KINDS
    ),
    Fault(
        "rolling-restart",
        _GROUP,
        "each worker is replaced: a new one starts, the old one gets SIGTERM",
        _restart_workers,
        _until_restarted,
        lasts=True,
    ),
    Fault(
        "rolling-weights",
        _GROUP,
        "each worker is replaced by one with other weights",
        _update_weights,
        _until_restarted,
        check=check_weights,
        lasts=True,
    ),
]
