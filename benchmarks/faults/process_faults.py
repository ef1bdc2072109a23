"""Faults of whole processes: killed, stopped, replaced one after the other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from benchmarks.faults.aims import DEATH_AIM_S, STOPPED_S, WOKEN_AIM_S
from benchmarks.faults.cluster import KINDS
from benchmarks.faults.fault import Action, Fault, Scene
from benchmarks.faults.foreign_workers import check_weights, note_weights
from benchmarks.faults.weights import other_weights

_GROUP = "Processes"


def _signals(kind: str, number: signal.Signals) -> Action:
    async def act(scene: Scene) -> None:
        scene.processes[kind].signal(number)

    return act


def _kills(kind: str) -> Action:
    async def act(scene: Scene) -> None:
        scene.to_end(kind).signal(signal.SIGKILL)

    return act


def _signals_behind_relay(number: signal.Signals) -> Action:
    """Signal Dynamo's frontend, and not the status relay that stands before it."""

    async def act(scene: Scene) -> None:
        kept = scene.kept
        if number != signal.SIGCONT:
            kept["behind"] = scene.to_end("frontend").children()
        for pid in kept["behind"]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

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


def stopped(kind: str, what: str, group: str, signals: Callable[[signal.Signals], Action]) -> Fault:
    """A process hangs. Only the liveness probe would end it, which the harness does not make.

    Args:
        what: is stopped.
        signals: signal -> the action that sends it.
    """
    return Fault(
        f"stop-{kind}",
        group,
        f"SIGSTOP of {what}, SIGCONT after {STOPPED_S:g} s",
        signals(signal.SIGSTOP),
        signals(signal.SIGCONT),
        holds_s=STOPPED_S,
        aim_s=WOKEN_AIM_S,
    )


PROCESS_FAULTS = [
    *(
        Fault(f"kill-{kind}", _GROUP, f"SIGKILL of the {kind} process of the round", _kills(kind), aim_s=DEATH_AIM_S)
        for kind in KINDS
    ),
    *(stopped(kind, f"the {kind} process of the round", _GROUP, partial(_signals, kind)) for kind in KINDS),
    Fault(
        "kill-behind-relay",
        _GROUP,
        "SIGKILL of Dynamo's frontend behind the status relay of the round",
        _signals_behind_relay(signal.SIGKILL),
        aim_s=DEATH_AIM_S,
    ),
    stopped("behind-relay", "Dynamo's frontend behind the status relay of the round", _GROUP, _signals_behind_relay),
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
