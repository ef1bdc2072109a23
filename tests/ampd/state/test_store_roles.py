"""What every store promises of the lead and of assigned roles; on the in-memory twin and on a real Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ampd.state.store import RoleAssigned, WorkerUpdated
from ampd.types import Role
from tests.ampd.state.contract_lab import HOSTILE_IDS, LONG_S, SHORT_S, is_falsy


class TestRoles:
    async def test_of_many_that_try_one_leads(self, cluster: Any) -> None:
        stores = [await cluster.store() for _ in range(8)]
        leads = await asyncio.gather(*(store.lead(f"c{index}", LONG_S) for index, store in enumerate(stores)))
        assert [lead.leads for lead in leads].count(True) == 1
        leader = [lead.leads for lead in leads].index(True)
        again = await asyncio.gather(*(store.lead(f"c{index}", LONG_S) for index, store in enumerate(stores)))
        assert [lead.leads for lead in again].index(True) == leader
        assert [lead.leads for lead in again].count(True) == 1

    async def test_a_leader_that_falls_silent_is_replaced_and_assigns_no_more(
        self, cluster: Any, make: Any, waiting: Any
    ) -> None:
        leader, successor = await cluster.store(), await cluster.store()
        assert (await leader.lead("c1", SHORT_S)).leads

        async def taken_over() -> bool:
            return bool((await successor.lead("c2", LONG_S)).leads)

        await waiting.until(taken_over)
        assert not await leader.assign_role("c1", make.role("d1"), LONG_S)
        assert not (await leader.lead("c1", LONG_S)).leads
        assert await leader.publish_worker(make.view("d1"), LONG_S) is None
        assert await successor.assign_role("c2", make.role("d1"), LONG_S)
        assert await leader.publish_worker(make.view("d1"), LONG_S) == make.role("d1")

    async def test_a_lease_that_ran_out_assigns_nothing_although_nobody_took_over(
        self, cluster: Any, make: Any, waiting: Any
    ) -> None:
        store = await cluster.store()
        await store.lead("c1", SHORT_S)

        async def refused() -> bool:
            return not await store.assign_role("c1", make.role("d1"), LONG_S)

        await waiting.until(refused)

    async def test_a_leader_may_resign_and_nobody_else_for_it(self, cluster: Any) -> None:
        leader, successor = await cluster.store(), await cluster.store()
        await leader.lead("c1", LONG_S)
        await successor.resign("c2")
        assert not (await successor.lead("c2", LONG_S)).leads
        await leader.resign("c1")
        assert (await successor.lead("c2", LONG_S)).leads

    async def test_an_assigned_role_is_heard_and_comes_with_every_publication(
        self, cluster: Any, make: Any, waiting: Any
    ) -> None:
        leader, worker = await cluster.store(), await cluster.store()
        watcher, everything = worker.watch_roles(), worker.watch()
        await watcher.start()
        await everything.start()
        assert (await leader.lead("c1", LONG_S)).assigned_ago_s is None
        first, second = make.role("d1", label='a "label"'), make.role("d1", role=Role.DECODE, reason="back")
        for role in (first, second):
            assert await leader.assign_role("c1", role, LONG_S)
            assert await worker.publish_worker(make.view("d1"), LONG_S) == role
            assert await worker.publish_worker(make.view("d1"), LONG_S) == role
        assert await worker.publish_worker(make.view("d2"), LONG_S) is None
        assert await waiting.events(watcher, 2) == [first, second]
        # What is heard there is not told to everybody who follows the cluster.
        assert {type(event) for event in await waiting.events(everything, 5)} == {WorkerUpdated}
        assert 0 <= (await leader.lead("c1", LONG_S)).assigned_ago_s < LONG_S
        await watcher.aclose()
        await everything.aclose()

    async def test_assigned_roles_are_forgotten(self, cluster: Any, make: Any, waiting: Any) -> None:
        store = await cluster.store()
        await store.lead("c1", LONG_S)
        await store.assign_role("c1", make.role("d1"), SHORT_S)
        await waiting.until(lambda: is_falsy(store.publish_worker(make.view("d1"), LONG_S)))

    @pytest.mark.parametrize("name", HOSTILE_IDS)
    async def test_any_string_is_a_name(self, cluster: Any, name: str) -> None:
        store = await cluster.store()
        role = RoleAssigned(name, Role.PREFILL, name, name)
        assert (await store.lead(name, LONG_S)).leads
        assert await store.assign_role(name, role, LONG_S)
        assert not await store.assign_role(name + "?", role, LONG_S)
