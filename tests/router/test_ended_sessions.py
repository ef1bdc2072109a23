"""A session ends in the shared state and at its workers, whichever of them does not answer."""

from __future__ import annotations

import asyncio

from ampd.keys import session_key
from ampd.state.store import Binding
from ampd.types import Role
from router.round_errors import WorkerLostError, WorkerRefusedError
from tests.memory_store import MemoryState, MemoryStore
from tests.router.replica_lab import Replica, cluster, worker
from tests.waiting import until

FINAL = {"session_id": "s", "session_final": True}
KEY = session_key("", "s")
RELEASE = "kv release_session"


async def test_a_final_round_tells_its_decode_worker_and_the_shared_state_at_once() -> None:
    """Its coordinator may die before the round ends."""
    clock_s = [0.0]
    state = MemoryState(lambda: clock_s[0])
    await MemoryStore(state).publish_worker(worker("d1"), 60.0)
    async with Replica(state, "always-local") as replica:
        await replica.round()
        ended = asyncio.Event()

        async def never(session_id: str, tenant: str = "", *, last: Binding | None = None) -> Binding | None:  # noqa: ARG001
            await ended.wait()
            return None

        replica.store.end_session = never
        assert [chunk["token_ids"] async for chunk in replica.chunks(agent_context=FINAL)]
        said = [request.get("ends_session") for name, _, request in replica.workers.calls if name == "generate"]
        assert said == [None, True]
        assert await MemoryStore(state).binding(KEY) is not None, "another coordinator finds the owner"
        clock_s[0] = 10.0
        assert await MemoryStore(state).binding(KEY) is None
        ended.set()


async def test_a_decode_worker_releases_a_session_whose_last_round_ends_with_its_prefill() -> None:
    """The coordinator releases it too, unless it has died."""
    async with Replica(await cluster(worker("d1"), worker("p1", Role.PREFILL))) as replica:
        await replica.round(stop_conditions={"max_tokens": 1}, agent_context=FINAL)
        await until(lambda: sorted(replica.workers.asked(RELEASE)) == ["d1", "d1", "p1"])
        assert not replica.workers.asked("generate")


async def test_workers_release_a_session_while_the_shared_state_does_not_answer() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        ended = asyncio.Event()

        async def slow(session_id: str, tenant: str = "", *, last: Binding | None = None) -> Binding | None:  # noqa: ARG001
            await ended.wait()
            return None

        replica.store.end_session = slow
        assert [chunk["token_ids"] async for chunk in replica.chunks(agent_context=FINAL)]
        await until(lambda: set(replica.workers.asked(RELEASE)) == {"d1", "p1"})
        ended.set()


async def test_a_coordinator_that_reaches_no_shared_state_leaves_the_end_to_the_worker() -> None:
    """It may die as soon as the round's last chunk is out."""
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local") as replica:
        await replica.round()
        unreachable = MemoryState()
        unreachable.lose()
        replica.store._state = unreachable
        replica.workers.store = MemoryStore(state)
        await replica.round(agent_context=FINAL)
        assert await MemoryStore(state).binding(KEY) is None


async def test_a_final_round_that_goes_on_elsewhere_has_not_ended_its_session() -> None:
    async with Replica(await cluster(worker("d1"), worker("d2")), "always-local") as replica:
        await replica.round()
        owner = (await replica.store.binding(KEY)).worker_id
        replica.workers.fail["generate", owner] = WorkerRefusedError(owner, 503, "its engine starts again")
        told = []
        ended = replica.store.end_session

        async def noted(session_id: str, tenant: str = "", *, last: Binding | None = None) -> Binding | None:
            told.append(last)
            return await ended(session_id, tenant, last=last)

        replica.store.end_session = noted
        await replica.round(agent_context=FINAL)
        assert told == [Binding(KEY, ({"d1", "d2"} - {owner}).pop(), 2)]


async def test_a_worker_that_failed_a_session_s_last_round_releases_it_too() -> None:
    async with Replica(await cluster(worker("d1"), worker("p1", Role.PREFILL))) as replica:
        replica.workers.fail["prefill", "p1"] = WorkerLostError("p1", "silent")
        replica.workers.fail[RELEASE, "d1"] = WorkerLostError("d1", "silent")
        await replica.round(agent_context=FINAL)
        assert set(replica.workers.asked(RELEASE)) == {"d1", "p1"}
        assert await replica.store.ended_sessions() == [KEY], "for the worker that did not answer"
