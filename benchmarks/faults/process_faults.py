"""Faults of whole processes: killed, stopped, replaced one after the other."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable

from benchmarks.faults.cluster import KINDS, LEASE_S, PREFILL_S, PREFILL_S_PER_TOKEN, Member
from benchmarks.faults.fault import DEATH_AIM_S, Action, Fault, Scene
from benchmarks.faults.moments import HISTORY_TOKENS, INCREMENT_TOKENS
from benchmarks.faults.weights import mixed_rounds, other_tokenizer, other_weights, rounds_of

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
                _note_weights(scene, [started])
                await graph.end(member, signal.SIGTERM)

    scene.running.append(asyncio.create_task(run()))


def _note_weights(scene: Scene, members: Iterable[Member]) -> None:
    scene.kept.setdefault("weights", {}).update((member.id, member.model) for member in members)


async def _update_weights(scene: Scene) -> None:
    """Replace each worker by one with other weights. The next update goes back to the first ones."""
    graph = scene.graph
    _note_weights(scene, graph.workers)
    other = other_weights(graph.model, graph.folder)
    graph.worker_model = other if graph.worker_model == graph.model else graph.model
    await _restart_workers(scene)


async def _add_foreign(scene: Scene) -> None:
    """A worker of each role with other weights joins."""
    graph = scene.graph
    _note_weights(scene, graph.workers)
    other = other_weights(graph.model, graph.folder)
    model = other if graph.worker_model == graph.model else graph.model
    scene.kept["foreign"] = [await graph.started(kind, model) for kind in ("prefill", "decode")]
    _note_weights(scene, scene.kept["foreign"])


async def _remove_foreign(scene: Scene) -> None:
    for member in scene.kept["foreign"]:
        await scene.graph.end(member, signal.SIGTERM)


async def _check_weights(scene: Scene) -> None:
    scene.complaints += mixed_rounds(scene.client.results, scene.kept["weights"])


async def _add_with_other_tokenizer(scene: Scene) -> None:
    """A worker of each role joins whose token ids mean another text."""
    graph = scene.graph
    other = other_tokenizer(graph.model, graph.folder)
    scene.kept["foreign"] = [await graph.started(kind, other) for kind in ("prefill", "decode")]


async def _remove_unused(scene: Scene) -> None:
    """They were in the shared state, and no coordinator counted on them."""
    foreign = {member.id for member in scene.kept["foreign"]}
    store = await scene.graph.store()
    published = {view.worker_id for view in await store.snapshot()}
    await store.close()
    known = [set((await each.ask(op="debug"))["workers"]) & foreign for each in scene.graph.of("coordinator")]
    if not foreign <= published or any(known):
        scene.complaints.append(f"of the workers {foreign}, {published & foreign} are published, and {known} known")
    await _remove_foreign(scene)


async def _check_unused(scene: Scene) -> None:
    """No round used the workers with another tokenizer."""
    foreign = [member.id for member in scene.kept["foreign"]]
    scene.complaints += [f"{each}: another tokenizer" for each in rounds_of(scene.client.results, foreign)]


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
        check=_check_weights,
        lasts=True,
    ),
    Fault(
        "other-weights",
        _GROUP,
        "a prefill and a decode worker with other weights join, and leave after 5 s",
        heal=_remove_foreign,
        prepare=_add_foreign,
        check=_check_weights,
        holds_s=5.0,
    ),
    Fault(
        "other-tokenizer",
        _GROUP,
        "a prefill and a decode worker with another tokenizer join, and leave after 5 s",
        heal=_remove_unused,
        prepare=_add_with_other_tokenizer,
        check=_check_unused,
        holds_s=5.0,
    ),
]
