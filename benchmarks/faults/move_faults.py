"""Faults in the moment in which a session moves: its owner becomes a prefill worker, so its next round leaves it."""

from __future__ import annotations

import asyncio
import signal

from ampd.state.store import RoleAssigned
from ampd.types import Role
from benchmarks.faults.aims import DEATH_AIM_S
from benchmarks.faults.cluster import Member
from benchmarks.faults.fault import Action, Fault, Scene
from benchmarks.faults.moments import Moment
from tests.waiting import until

_GROUP = "Moves"
_LEADER = "faults"
_LEADS_S = 120.0
_NOT_MOVING = tuple(moment for moment in Moment if moment is not Moment.TOOL_GAP)
_PLACED_S = 10.0


async def _assign(scene: Scene, worker_id: str, role: Role) -> None:
    """Change a worker's role, as a leading coordinator does. Those of the graph do not lead."""
    store = await scene.graph.store()
    try:
        await store.lead(_LEADER, _LEADS_S)
        await store.assign_role(_LEADER, RoleAssigned(worker_id, role, "", "fault"), _LEADS_S)

        async def has_changed() -> bool:
            return any(view.worker_id == worker_id and view.role is role for view in await store.snapshot())

        await until(has_changed, poll_s=0.02)
    finally:
        await store.resign(_LEADER)
        await store.close()


def _kills(part: str) -> Action:
    """Let the owner of the session change its role, and kill a part of the next round as soon as that is placed."""

    async def act(scene: Scene) -> None:
        owner = scene.processes["decode"]
        scene.kept["owner"], scene.kept["moved"] = owner, False
        await _assign(scene, owner.id, Role.PREFILL)

        async def kill() -> None:
            await until(lambda: scene.stage.processes()["decode"] is not owner, _PLACED_S, poll_s=0.005)
            member = {**scene.stage.processes(), "old owner": owner}[part]
            if member not in scene.spared:
                scene.kept["moved"] = True
                member.signal(signal.SIGKILL)

        scene.running.append(asyncio.create_task(kill()))

    return act


async def _has_moved(scene: Scene) -> bool:
    return bool(scene.kept["moved"])


async def _change_back(scene: Scene) -> None:
    await asyncio.gather(*scene.running, return_exceptions=True)
    owner: Member = scene.kept["owner"]
    if owner.is_running:
        await _assign(scene, owner.id, Role.DECODE)


MOVE_FAULTS = [
    Fault(
        f"move-kill-{part.replace(' ', '-')}",
        _GROUP,
        f"SIGKILL of the {name} as soon as the round that moves its session is placed",
        _kills(part),
        _change_back,
        has_struck=_has_moved,
        never_at=_NOT_MOVING,
        aim_s=DEATH_AIM_S,
    )
    for part, name in (("old owner", "old owner"), ("decode", "new owner"), ("coordinator", "coordinator"))
]
