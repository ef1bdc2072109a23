"""Faults inside workers: reads of KV, publications, weights, engines, and the long-lived tasks of all processes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from benchmarks.faults import inside
from benchmarks.faults.aims import DEATH_AIM_S, KV_STALLS_AIM_S, MODELLED_HANG_AIM_S
from benchmarks.faults.cluster import LEASE_S, Member
from benchmarks.faults.fault import Action, Check, Fault, Scene
from benchmarks.faults.moments import Moment
from benchmarks.faults.worker import WATCHDOG_S
from tests.waiting import until

_GROUP = "Inside workers"
NO_READ_AT = (Moment.DECODING,)
"""The victim has read all of its KV. Sessions beside it, if there are any, seldom read, because computing their short
contexts is faster."""

_NO_LEASE_AT = (Moment.READING_INCREMENT, *NO_READ_AT)
"""The victim's last read has begun."""

_ENDS_WITHIN_S = 60.0
_GIVEN_UP_S = 15.0
"""Longer than ten times any predicted prefill here, after which a worker gives up an engine that hangs."""


async def _ask_all(members: list[Member], **request: str) -> None:
    await asyncio.gather(*(member.ask(**request) for member in members))


def arms_workers(fault: str) -> Action:
    """Switch a fault on in all workers."""

    async def act(scene: Scene) -> None:
        await _ask_all(scene.graph.workers, op="arm", fault=fault)

    return act


def struck(fault: str) -> Check:
    """Whether a fault that is switched on has struck in any process."""

    async def has_struck(scene: Scene) -> bool:
        return any(view["struck"].get(fault) for view in (await scene.graph.figures()).values())

    return has_struck


def armed(name: str, group: str, text: str, fault: str, **more: Any) -> Fault:
    """A row of the matrix whose fault is switched on in all workers until it is healed.

    Args:
        fault: among those of `benchmarks.faults.inside`.
        more: further fields of `Fault`.
    """
    return Fault(name, group, text, arms_workers(fault), disarm, has_struck=struck(fault), **more)


async def disarm(scene: Scene) -> None:
    """Switch all faults of all workers off, but for those that end."""
    await asyncio.gather(*map(_disarm, scene.graph.workers))


async def _disarm(member: Member) -> None:
    try:
        await member.ask(op="disarm")
    except (OSError, ValueError):
        # Its engine broke. The process still runs for a moment after its socket has closed.
        await until(lambda: not member.is_running, _ENDS_WITHIN_S)


def _arms_worker_of_the_round(fault: str) -> Action:
    async def act(scene: Scene) -> None:
        await scene.worker.ask(op="arm", fault=fault)

    return act


def _arms_engine_of_the_round(fault: str) -> Action:
    """A worker may end with its engine."""

    async def act(scene: Scene) -> None:
        scene.kept["broken"] = scene.worker_to_end
        await scene.kept["broken"].ask(op="arm", fault=fault)

    return act


def _struck_engine(fault: str) -> Check:
    """The process of an engine that breaks may have ended."""

    async def has_struck(scene: Scene) -> bool:
        try:
            view = await scene.kept["broken"].ask(op="debug")
        except (OSError, ValueError):
            return True
        return bool(view["struck"].get(fault))

    return has_struck


async def _until_given_up(scene: Scene) -> None:
    """The worker ends with its engine, so that it can be replaced before the next run."""
    with suppress(TimeoutError):
        await until(lambda: not scene.kept["broken"].is_running, _GIVEN_UP_S)
    await disarm(scene)


async def _break_tasks(scene: Scene) -> None:
    members = [*scene.graph.workers, *scene.graph.of("coordinator")]
    await _ask_all(members, op="arm", fault=inside.TASK_EXCEPTION)


KV_FAULTS = [
    armed(
        "kv-refused",
        _GROUP,
        "workers refuse reads of their KV",
        inside.KV_FAILS,
        never_at=_NO_LEASE_AT,
    ),
    armed(
        "kv-stalls",
        _GROUP,
        "reads of KV stop in the middle and do not end",
        inside.KV_STALLS,
        never_at=NO_READ_AT,
        holds_s=3.0,
        aim_s=KV_STALLS_AIM_S,
    ),
    armed(
        "kv-breaks",
        _GROUP,
        "reads of KV break off",
        inside.KV_COPY_FAILS,
        never_at=NO_READ_AT,
    ),
    armed(
        "kv-lies",
        _GROUP,
        "workers answer reads of KV with nonsense",
        inside.KV_LIES,
        never_at=_NO_LEASE_AT,
    ),
    Fault(
        "nonsense",
        _GROUP,
        "the worker of the round publishes malformed views",
        _arms_worker_of_the_round(inside.NONSENSE),
        disarm,
        has_struck=struck(inside.NONSENSE),
        holds_s=2 * LEASE_S,
    ),
    Fault(
        "engine-breaks",
        _GROUP,
        "an exception in the engine of the worker",
        _arms_engine_of_the_round(inside.ENGINE_BREAKS),
        disarm,
        has_struck=_struck_engine(inside.ENGINE_BREAKS),
        aim_s=DEATH_AIM_S,
    ),
    Fault(
        "engine-hangs",
        _GROUP,
        f"the engine of the worker hangs (given up after {WATCHDOG_S:g} s here, 60 s in real workers)",
        _arms_engine_of_the_round(inside.ENGINE_HANGS),
        _until_given_up,
        has_struck=_struck_engine(inside.ENGINE_HANGS),
        holds_s=WATCHDOG_S + 2.0,
        aim_s=MODELLED_HANG_AIM_S,
    ),
    Fault(
        "task-exceptions",
        _GROUP,
        "an exception in each long-lived task of all workers and coordinators",
        _break_tasks,
        disarm,
        has_struck=struck(inside.TASK_EXCEPTION),
    ),
]

SABOTAGE = [
    armed(
        "leaks-protection",
        "Sabotage",
        "workers protect the KV of a request for ever",
        inside.LEAKS_PROTECTION,
        holds_s=5.0,
    ),
    armed(
        "repeats-tokens",
        "Sabotage",
        "workers repeat a token",
        inside.REPEATS_TOKENS,
    ),
]
"""Broken workers, which the harness must report. They are no part of the matrix."""
