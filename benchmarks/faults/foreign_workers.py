"""Faults with workers of other weights, another dtype or another tokenizer.

One of each role joins between the victim's first round and its second. The worker of the second round is killed at the
moment, so that the round, the sessions beside it and the victim's next round could go on at a foreign worker, read its
KV, or hand theirs to it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ampd.keys import PAGE_TOKENS
from benchmarks.faults.aims import DEATH_AIM_S
from benchmarks.faults.cluster import LiveGraph, Member
from benchmarks.faults.fault import Action, Fault, Scene
from benchmarks.faults.load import Agent, Client, Ending, RoundResult
from benchmarks.faults.moments import FIRST_OUTPUT_TOKENS, HISTORY_TOKENS, MissedMomentError
from benchmarks.faults.tokens import AnyText
from benchmarks.faults.weights import (
    foreign_reads,
    mixed_rounds,
    other_dtype,
    other_tokenizer,
    other_weights,
    rounds_of,
)

_NEWCOMERS_AT_ONCE = (1, 2, 4, 8, 16, 32)
"""Sessions that begin together. More at once are spread further, although the other workers have KV of their prompt."""

_HOLDS_S = 3.0
_SGLANG_DTYPE = ("--dtype", "bfloat16")
"""Of the foreign workers; the others have fp32."""


def note_weights(scene: Scene, members: Iterable[Member]) -> None:
    """Remember which model folder a worker has. Workers of two folders must not share a round or KV."""
    scene.kept.setdefault("weights", {}).update((member.id, member.model) for member in members)


async def check_weights(scene: Scene) -> None:
    """No round and no read of KV had workers of two folders."""
    weights = scene.kept.get("weights", {})
    scene.complaints += mixed_rounds(scene.client.results, weights)
    scene.complaints += [text for member in scene.graph.workers for text in foreign_reads(member.read_log(), weights)]


def _joins(model: Callable[[LiveGraph], Path], sglang_flags: Collection[str] = ()) -> Action:
    """Foreign workers join, and serve a session that begins with the victim's own prompt.

    Its KV has the same names there as the victim's KV elsewhere.
    """

    async def act(scene: Scene) -> None:
        graph = scene.graph
        note_weights(scene, graph.workers)
        await _start(scene, model(graph), sglang_flags)
        note_weights(scene, scene.kept["foreign"])
        await graph.until_whole()
        await _use_foreign(scene)

    return act


async def _start(scene: Scene, model: Path, sglang_flags: Collection[str] = ()) -> None:
    graph = scene.graph
    scene.kept["foreign"] = foreign = []
    for kind in ("prefill", "decode"):
        foreign.append(await graph.started(kind, model, sglang_flags if graph.engine == "sglang" else ()))
    scene.spared = (*scene.spared, *foreign)


async def _use_foreign(scene: Scene) -> None:
    """New sessions, until a foreign worker has decoded one.

    Raises:
        MissedMomentError: none has.
    """
    stage, foreign = scene.stage, {member.id for member in scene.kept["foreign"]}
    newcomers: list[Agent] = []
    scene.kept["newcomers"] = newcomers
    scene.kept["client"] = client = Client(lambda: [scene.client.next_url()], AnyText(), scene.client.bound_s)
    for count in _NEWCOMERS_AT_ONCE:
        names = [f"{stage.victim.session_id}-newcomer-{len(newcomers) + number}" for number in range(count)]
        group = [Agent(client, AnyText(), name, stage.rng(stage.name)) for name in names]
        newcomers += group
        results = await asyncio.gather(*(agent.round(HISTORY_TOKENS, FIRST_OUTPUT_TOKENS) for agent in group))
        if any(_served_by(result, foreign) for result in results):
            return
    raise MissedMomentError(f"none of {len(newcomers)} sessions came to the foreign workers")


def _served_by(result: RoundResult, worker_ids: Collection[str]) -> bool:
    """Whether these workers, and no others, took part in a round."""
    used = {record[role] for record in result.records for role in ("prefill_worker", "decode_worker")} - {None}
    return bool(used) and used <= set(worker_ids)


async def _kill_worker(scene: Scene) -> None:
    """SGLang's processes end with their worker."""
    scene.kept["killed"] = scene.worker_to_end
    scene.kept["killed"].signal(signal.SIGKILL)


async def _is_dead(scene: Scene) -> bool:
    return not scene.kept["killed"].is_running


async def _check_and_remove(scene: Scene) -> None:
    """Workers leave while sessions are still on them, which must go on elsewhere with KV that is computed again."""
    foreign = scene.kept.get("foreign", [])
    forgive_foreign_texts(scene.client.results, [member.id for member in foreign])
    await check_weights(scene)
    await _remove(scene)
    await scene.graph.replace_ended()
    await scene.graph.until_whole()
    note_weights(scene, scene.graph.workers)
    if (client := scene.kept.get("client")) is not None:
        for agent in scene.kept["newcomers"]:
            await agent.round(PAGE_TOKENS, 1, is_final=True)
        await check_weights(replace(scene, client=client))
        await client.close()


def forgive_foreign_texts(results: Iterable[RoundResult], foreign: Collection[str]) -> None:
    """A round that only foreign workers served has the text of their weights, which nobody knows beforehand."""
    for result in results:
        if result.ending is Ending.WRONG and _served_by(result, foreign):
            result.ending = Ending.COMPLETED if result.finish_reason else Ending.FAILED
            result.detail = "" if result.finish_reason else "the stream of a foreign worker broke off"


async def _remove(scene: Scene) -> None:
    for member in scene.kept.get("foreign", []):
        if member.is_running:
            await scene.graph.end(member, signal.SIGTERM)


async def _add_with_other_tokenizer(scene: Scene) -> None:
    """No coordinator counts on them, so that no session can come to them."""
    await _start(scene, other_tokenizer(scene.graph.model, scene.graph.folder))


async def _remove_unused(scene: Scene) -> None:
    """They were in the shared state, and no coordinator counted on them."""
    graph, foreign = scene.graph, {member.id for member in scene.kept["foreign"]}
    store = await graph.store()
    published = {view.worker_id for view in await store.snapshot()}
    await store.close()
    known = [set((await each.ask(op="debug"))["workers"]) & foreign for each in graph.of("coordinator")]
    if not foreign <= published or any(known):
        scene.complaints.append(f"of the workers {foreign}, {published & foreign} are published, and {known} known")
    await _remove(scene)


async def _check_unused(scene: Scene) -> None:
    """No round used the workers with another tokenizer."""
    foreign = [member.id for member in scene.kept.get("foreign", [])]
    scene.complaints += [f"{each}: another tokenizer" for each in rounds_of(scene.client.results, foreign)]


def _model(copy: Callable[[Path, Path], Path], graph: LiveGraph) -> Path:
    """The copy, or after a rolling update to it the original."""
    other = copy(graph.model, graph.folder)
    return other if graph.worker_model == graph.model else graph.model


def _dtype_model(graph: LiveGraph) -> Path:
    """SGLang has a flag for it. Then the folders are equal."""
    return other_dtype(graph.model, graph.folder, in_config=graph.engine != "sglang")


def _fault(name: str, what: str, **more: Any) -> Fault:
    text = f"SIGKILL of the worker of the round, where a prefill and a decode worker with {what} have joined"
    return Fault(
        f"other-{name}",
        "Foreign workers",
        text,
        _kill_worker,
        has_struck=_is_dead,
        holds_s=_HOLDS_S,
        aim_s=DEATH_AIM_S,
        **more,
    )


FOREIGN_FAULTS = [
    _fault("weights", "other weights", enter=_joins(partial(_model, other_weights)), check=_check_and_remove),
    _fault("dtype", "another dtype", enter=_joins(_dtype_model, _SGLANG_DTYPE), check=_check_and_remove),
    _fault(
        "tokenizer",
        "another tokenizer",
        enter=_add_with_other_tokenizer,
        heal=_remove_unused,
        check=_check_unused,
    ),
]
