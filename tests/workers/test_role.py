"""A worker's role: it takes what it is assigned, and listens again after the state was lost."""

from __future__ import annotations

import asyncio

from ampd.state.redis_store import StateStore
from ampd.state.store import RoleAssigned
from ampd.types import Role
from tests.memory_store import MemoryState, MemoryStore
from tests.virtual_time import virtually
from tests.waiting import until
from workers.role import WorkerRole, follow_roles


def test_a_role_is_taken_once_and_only_new_roles_count() -> None:
    role = WorkerRole(Role.DECODE)
    assert not role.adopt(RoleAssigned("w", Role.DECODE, "", "as it is"))
    assert role.adopt(RoleAssigned("w", Role.PREFILL, "long", "busy"))
    assert (role.role, role.label) == (Role.PREFILL, "long")
    assert role.adopt(RoleAssigned("w", Role.PREFILL, "short", "pressure"))
    assert not role.adopt(RoleAssigned("w", Role.PREFILL, "short", "again"))
    assert role.changes == {Role.PREFILL: 1}, "another label is the same role"


@virtually
async def test_it_hears_of_its_own_roles_and_again_after_the_state_was_lost() -> None:
    clock = asyncio.get_running_loop().time
    state = MemoryState(clock)
    leader, heard = MemoryStore(state), []
    listening = asyncio.create_task(follow_roles(MemoryStore(state), "w1", lambda: heard.append(clock()), retry_s=5.0))
    await leader.lead("c", 1e6)

    async def assign(store: StateStore, worker_id: str) -> None:
        await store.assign_role("c", RoleAssigned(worker_id, Role.PREFILL, "", "test"), 1e6)

    await asyncio.sleep(1.0)
    await assign(leader, "w2")
    await asyncio.sleep(1.0)
    assert heard == []
    await assign(leader, "w1")
    await until(lambda: len(heard) == 1)
    state.lose()
    await asyncio.sleep(20.0)
    state.restore()
    await asyncio.sleep(6.0)
    await leader.lead("c", 1e6)
    await assign(leader, "w1")
    await until(lambda: len(heard) == 2)
    listening.cancel()
    await asyncio.wait({listening})
