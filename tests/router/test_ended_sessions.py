"""What is left of a session that has ended goes when the shared state and its workers answer again."""

from __future__ import annotations

import asyncio

import pytest

from ampd.session_key import session_key
from ampd.state.store import Binding, StateUnavailableError
from ampd.types import Role
from router.round_errors import RoundRefusedError, WorkerLostError
from tests.memory_store import MemoryStore
from tests.router.replica_lab import Replica, cluster, worker
from tests.waiting import until

FINAL = {"session_id": "s", "session_final": True}
KEY = session_key("", "s")


async def test_a_session_that_ends_in_an_outage_is_not_bound_after_it() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local") as replica:
        await replica.round()
        state.lose()
        await replica.round(agent_context=FINAL)
        assert len(replica.ended) == 1
        state.restore()
        await until(lambda: not len(replica.ended))
        assert await MemoryStore(state).binding(KEY) is None


async def test_a_session_that_begins_again_stays_bound() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local") as replica:
        await replica.round()
        state.lose()
        await replica.round(agent_context=FINAL)
        await replica.round()
        assert len(replica.ended) == 0
        state.restore()
        assert await MemoryStore(state).binding(KEY) is not None


@pytest.mark.parametrize("fails", [False, True])
async def test_a_session_that_begins_again_before_its_end_is_answered_keeps_what_it_has(fails: bool) -> None:
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local") as replica:
        await replica.round()
        end, asked, goes_on = replica.store.end_session, asyncio.Event(), asyncio.Event()

        async def slow(session_id: str, tenant: str = "") -> Binding | None:
            bound = None if fails else await end(session_id, tenant)
            asked.set()
            await goes_on.wait()
            if fails:
                raise StateUnavailableError("no answer")
            return bound

        replica.store.end_session = slow
        for agent in (FINAL, {"session_id": "s"}):
            async for _ in replica.chunks(agent_context=agent):
                pass
            await asked.wait()
        replica.store.end_session = end
        goes_on.set()
        await asyncio.gather(*replica.tasks)
        assert len(replica.ended) == 0
        assert RELEASE not in [name for name, *_ in replica.workers.calls]
        assert await MemoryStore(state).binding(KEY) is not None


async def test_many_ends_are_written_and_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.ended_sessions._MOST", 2)
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local") as replica:
        state.lose()
        for number in range(3):
            replica.ended.still_bound(f"s{number}", "")
        assert len(replica.ended) == 2
        state.restore()
        await until(lambda: not len(replica.ended))


RELEASE = "kv release_session"


async def test_a_worker_that_failed_a_session_s_last_round_releases_it_too() -> None:
    async with Replica(await cluster(worker("d1"), worker("p1", Role.PREFILL))) as replica:
        replica.workers.fail["prefill", "p1"] = WorkerLostError("p1", "silent")
        await replica.round(agent_context=FINAL)
        assert set(replica.workers.asked(RELEASE)) == {"d1", "p1"}


async def test_a_worker_that_could_not_be_called_releases_the_session_when_it_is_back() -> None:
    async with Replica(await cluster(worker("d1"), worker("p1", Role.PREFILL))) as replica:
        replica.workers.fail["prefill", "p1"] = WorkerLostError("p1", "silent")
        replica.workers.fail[RELEASE, "p1"] = WorkerLostError("p1", "silent")
        await replica.round(agent_context=FINAL)
        assert replica.workers.asked(RELEASE).count("p1") == 1
        assert len(replica.ended) == 1
        del replica.workers.fail[RELEASE, "p1"]
        await replica.store.publish_worker(worker("p1", Role.PREFILL), 60.0)
        await until(lambda: not len(replica.ended))
        assert replica.workers.asked(RELEASE).count("p1") == 2


async def test_a_silent_worker_holds_up_no_other_end() -> None:
    workers = [worker("d1"), worker("p1", Role.PREFILL), worker("p2", Role.PREFILL)]
    async with Replica(await cluster(*workers)) as replica:
        replica.workers.fail[RELEASE, "p1"] = WorkerLostError("p1", "silent")
        for number in range(50):
            replica.ended.still_held(f"s{number}", "p1")
        replica.ended.still_held("another", "p2")
        await until(lambda: "p2" in replica.workers.asked(RELEASE))
        assert replica.workers.asked(RELEASE).count("p1") == 1  # each call may take its whole timeout
        del replica.workers.fail[RELEASE, "p1"]
        await until(lambda: not len(replica.ended))


async def test_a_session_that_begins_again_is_not_released() -> None:
    async with Replica(await cluster(worker("d1"), worker("p1", Role.PREFILL))) as replica:
        replica.workers.fail["prefill", "p1"] = WorkerLostError("p1", "silent")
        replica.workers.fail[RELEASE, "p1"] = WorkerLostError("p1", "silent")
        await replica.round(agent_context=FINAL)
        await replica.round()
        assert len(replica.ended) == 0


async def test_a_session_whose_new_round_is_refused_is_released_all_the_same() -> None:
    async with Replica(await cluster(worker("d1"), worker("p1", Role.PREFILL)), max_sessions=1) as replica:
        replica.workers.fail["prefill", "p1"] = WorkerLostError("p1", "silent")
        replica.workers.fail[RELEASE, "p1"] = WorkerLostError("p1", "silent")
        await replica.round(agent_context=FINAL)
        await replica.round("another")
        with pytest.raises(RoundRefusedError, match="live sessions"):
            await replica.round()
        del replica.workers.fail[RELEASE, "p1"]
        await replica.store.publish_worker(worker("p1", Role.PREFILL, held_tokens={KEY: 64}), 60.0)
        await until(lambda: replica.workers.asked(RELEASE).count("p1") == 2)
        await until(lambda: not len(replica.ended))
        assert await replica.store.binding(KEY) is None


async def test_a_worker_that_does_not_come_back_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.ended_sessions.WORKER_RETURNS_S", 0.0)
    async with Replica(await cluster(worker("d1"))) as replica:
        replica.ended.still_held("s", "p9")
        await until(lambda: not len(replica.ended))
        assert replica.workers.asked(RELEASE) == []


async def test_a_worker_that_was_away_when_a_session_ended_releases_it_when_it_is_back() -> None:
    holding = worker("p1", Role.PREFILL, held_tokens={KEY: 64, "another": 32})
    async with Replica(await cluster(worker("d1"), worker("p1", Role.PREFILL))) as replica:
        await replica.round()
        await replica.store.remove_worker("p1")
        await until(lambda: replica.view.worker("p1") is None)
        await replica.round(agent_context=FINAL)
        assert "p1" not in replica.workers.asked(RELEASE)
        await replica.store.publish_worker(holding, 60.0)
        await until(lambda: "p1" in replica.workers.asked(RELEASE))
        await until(lambda: not len(replica.ended))
        released = [
            request["session_id"] for name, at, request in replica.workers.calls if (name, at) == (RELEASE, "p1")
        ]
        assert released == [KEY]


async def test_rounds_without_a_session_do_not_displace_ended_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.ended_sessions._MOST", 1)
    async with Replica(await cluster(worker("d1"), worker("p1", Role.PREFILL))) as replica:
        await replica.round()
        await replica.store.remove_worker("p1")
        await until(lambda: replica.view.worker("p1") is None)
        await replica.round(agent_context=FINAL)
        await replica.round(None)
        await replica.store.publish_worker(worker("p1", Role.PREFILL, held_tokens={KEY: 64}), 60.0)
        await until(lambda: "p1" in replica.workers.asked(RELEASE))


async def test_a_session_that_lives_again_stays_on_a_worker_that_comes_back() -> None:
    async with Replica(await cluster(worker("d1"), worker("p1", Role.PREFILL))) as replica:
        await replica.round()
        await replica.store.remove_worker("p1")
        await replica.round(agent_context=FINAL)
        await replica.round()
        await replica.store.publish_worker(worker("p1", Role.PREFILL, held_tokens={KEY: 64}), 60.0)
        await until(lambda: replica.view.worker("p1") is not None)
        replica.ended._find_returned()
        assert len(replica.ended) == 0


@pytest.mark.parametrize("is_known_late", [False, True])
async def test_kv_that_nobody_told_of_during_an_outage_is_released_after_it(
    is_known_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends before this replica follows the shared state again, or before the worker has published again."""
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    holding = worker("d2", held_tokens={KEY: 64})
    async with Replica(state, "always-local") as replica:
        await replica.round()
        may_connect, connect = asyncio.Event(), replica.view._connect

        async def connect_later() -> None:
            await may_connect.wait()
            await connect()

        monkeypatch.setattr(replica.view, "_connect", connect_later)
        state.lose()
        await until(lambda: not replica.view.connected)
        if is_known_late:
            await replica.round(agent_context=FINAL)
            state.restore()
            may_connect.set()
            await until(lambda: replica.view.connected)
            replica.ended._find_returned()  # its last view is the one before the outage
        else:
            state.restore()
            await MemoryStore(state).publish_worker(holding, 60.0)
            await replica.round(agent_context=FINAL)
            may_connect.set()
            await until(lambda: replica.view.connected)
        assert replica.workers.asked(RELEASE) == ["d1"]
        await MemoryStore(state).publish_worker(holding, 60.0)  # as workers do again and again
        await until(lambda: "d2" in replica.workers.asked(RELEASE))
