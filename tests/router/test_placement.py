"""Where rounds go: bindings of sessions, races between replicas, a lost store and workers without times."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from ampd.keys import session_key
from ampd.serving.placement import deterministic_choice
from ampd.state.store import Binding, StateSlowError
from ampd.types import Parallelism, Role
from router.round_errors import RoundRefusedError
from tests.memory_store import MemoryStore
from tests.router.replica_lab import PROMPT, Replica, cluster, worker
from tests.waiting import until

EXPECTED = [64, 65, 66, 67, 68]


async def test_the_loser_of_a_race_follows_the_winner() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as replica, Replica(state) as other:
        await replica.round("s")
        # The other replica would now choose d2, for d1 has more to do; it does not know of the session.
        await other.store.publish_worker(worker("d1", kv_used_tokens=5000), 60.0)
        await asyncio.sleep(0)
        _, record = await other.round("s")
        assert record["decode_worker"] == "d1"
        assert other.workers.asked("generate") == ["d1"]


async def test_a_session_stays_at_a_worker_that_becomes_a_prefill_worker() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as replica:
        await replica.round("s")
        await replica.store.publish_worker(worker("d1", Role.PREFILL), 60.0)
        await asyncio.sleep(0)
        _, record = await replica.round("s")
        # The only prefill worker is its own decode worker: that is not remote.
        assert (record["decode_worker"], record["epoch"], record["reason"]) == ("d1", 1, "no-prefill-worker")
        _, record = await replica.round("new")
        assert (record["decode_worker"], record["prefill_worker"]) == ("d2", "d1")


async def test_a_dead_worker_s_session_moves_with_the_next_epoch() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as replica:
        assert (await replica.round())[1]["decode_worker"] == "d1"
        await replica.store.remove_worker("d1")
        await asyncio.sleep(0)
        _, record = await replica.round()
        assert (record["decode_worker"], record["epoch"]) == ("d2", 2)
        assert (await replica.store.binding(session_key("", "s"))).epoch == 2


async def test_a_session_that_moved_while_the_store_was_away_stays_where_it_moved() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as replica, Replica(state) as other:
        assert (await replica.round())[1]["decode_worker"] == "d1"
        state.lose()
        replica.services.placer.suspect("d1")
        _, record = await replica.round()
        assert (record["decode_worker"], record["epoch"]) == ("d2", 2)
        state.restore()
        replica.services.placer.store_answered()
        _, record = await replica.round()
        assert (record["decode_worker"], record["epoch"]) == ("d2", 2)
        assert (await other.round())[1]["epoch"] == 2


async def test_no_decode_worker_is_503_and_a_long_prompt_400_with_both_numbers() -> None:
    async with Replica(await cluster(worker("p1", Role.PREFILL))) as replica:
        with pytest.raises(RoundRefusedError) as refusal:
            await replica.round()
        assert refusal.value.status == 503
    async with Replica(await cluster(worker("d1"))) as replica:
        with pytest.raises(RoundRefusedError, match=r"1000 tokens.*1000 tokens") as refusal:
            await replica.round(token_ids=[1] * 1000)
        assert refusal.value.status == 400


async def test_replicas_without_the_store_agree_on_new_sessions_and_tell_it_later() -> None:
    views = [worker(f"d{number}", kv_used_tokens=number) for number in range(5)]
    state = await cluster(*views)
    async with Replica(state) as replica, Replica(state) as other:
        before = (await replica.round("known"))[1]["decode_worker"]
        state.lose()
        assert (await replica.round("known"))[1]["decode_worker"] == before
        chosen = {}
        for name in ("a", "b", "c", "d", "e", "f"):
            chosen[name] = (await replica.round(name))[1]["decode_worker"]
            assert (await other.round(name))[1]["decode_worker"] == chosen[name]
            assert chosen[name] == deterministic_choice(session_key("", name), views).worker_id
        assert len(set(chosen.values())) > 1
        state.restore(empty=True)
        for each in (replica, other):
            each.services.placer.store_answered()
        assert (await replica.round("a"))[1]["decode_worker"] == chosen["a"]
        assert (await other.store.binding(session_key("", "a"))).worker_id == chosen["a"]


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_session_of_another_replica_goes_to_the_worker_that_holds_it(is_lost: bool) -> None:
    key = session_key("", "a")
    views = [worker(f"d{number}") for number in range(5)]
    holder = next(view for view in views if view is not deterministic_choice(key, views))
    state = await cluster(*(replace(view, held_tokens={key: 2}) if view is holder else view for view in views))
    async with Replica(state) as replica:
        if is_lost:
            state.lose()
        assert (await replica.round("a"))[1]["decode_worker"] == holder.worker_id


async def test_rounds_do_not_ask_a_lost_store_until_a_heartbeat_was_answered() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state) as replica:
        await replica.round("s")
        state.lose()
        await replica.round("s")
        failed = replica.store.round_trips.failures["route"]
        assert failed == 1
        replica.services.placer._clock = lambda: time.monotonic() + 5.0
        await replica.round("s")
        assert replica.store.round_trips.failures["route"] == failed
        replica.services.placer.store_answered()
        await replica.round("s")
        assert replica.store.round_trips.failures["route"] == failed + 1


async def test_a_model_that_lacks_a_worker_s_parallelism_does_not_fail_rounds() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, failing="routing") as replica:
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert (record["route"], record["reason"]) == ("local", "no-performance-model")


async def test_nor_does_it_fail_a_binding() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, failing="binding") as replica:
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert record["decode_worker"] == "d1"


async def test_a_worker_of_unknown_parallelism_is_left_out_and_not_the_route() -> None:
    odd = worker("p1", Role.PREFILL, parallelism=Parallelism(tp=7))
    state = await cluster(worker("d1"), odd, worker("p2", Role.PREFILL))
    async with Replica(state, routing="predictive") as replica:
        records = [(await replica.round(f"s{number}"))[1] for number in range(8)]
    assert {record["reason"] for record in records} != {"no-performance-model"}
    assert "p1" not in replica.workers.asked("prefill")
    assert "p2" in replica.workers.asked("prefill")


async def test_the_sessions_of_a_dead_worker_read_the_state_once() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state) as replica:
        for number in range(5):
            await replica.round(f"s{number}")
        others = MemoryStore(state)
        await others.publish_worker(worker("d2"), 60.0)
        await others.remove_worker("d1")
        await until(lambda: replica.view.worker("d1") is None and replica.view.worker("d2") is not None)
        before = replica.store.round_trips.calls["snapshot"]
        for number in range(5):
            _, record = await replica.round(f"s{number}")
            assert record["decode_worker"] == "d2"
        assert replica.store.round_trips.calls["snapshot"] == before + 1


async def test_rounds_at_once_of_a_dead_worker_read_the_state_once() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state) as replica:
        names = [f"s{number}" for number in range(30)]
        for name in names:
            await replica.round(name)
        others = MemoryStore(state)
        await others.publish_worker(worker("d2"), 60.0)
        await others.remove_worker("d1")
        await until(lambda: replica.view.worker("d1") is None and replica.view.worker("d2") is not None)
        before, snapshot = replica.store.round_trips.calls["snapshot"], replica.store.snapshot

        async def later() -> Any:
            views = await snapshot()
            for _ in range(20):  # a round trip takes time
                await asyncio.sleep(0)
            return views

        replica.store.snapshot = later
        records = [record for _, record in await asyncio.gather(*(replica.round(name) for name in names))]
        assert {record["decode_worker"] for record in records} == {"d2"}
        assert replica.store.round_trips.calls["snapshot"] == before + 1


@pytest.mark.parametrize("call", ["snapshot", "rebind"])
async def test_a_slow_answer_about_a_dead_worker_concerns_its_round_only(call: str) -> None:
    state = await cluster(worker("d1"))
    async with Replica(state) as replica:
        for name in ("a", "b"):
            await replica.round(name)
        others = MemoryStore(state)
        await others.publish_worker(worker("d2"), 60.0)
        await others.remove_worker("d1")
        await until(lambda: replica.view.worker("d1") is None and replica.view.worker("d2") is not None)
        answers = getattr(replica.store, call)

        async def slow(*_: Any) -> Any:
            setattr(replica.store, call, answers)
            raise StateSlowError("shared state needs longer")

        setattr(replica.store, call, slow)
        tokens, record = await replica.round("a")
        assert (tokens, record["decode_worker"]) == (EXPECTED, "d2")
        assert replica.services.placer._store_answers()
        await replica.round("b")
        assert (await replica.store.binding(session_key("", "b"))).worker_id == "d2"


async def test_a_slow_answer_concerns_its_round_only() -> None:
    """Redis answers others, so the next rounds are shared with the other replicas at once."""
    async with Replica(await cluster(worker("d1"), worker("d2", kv_used_tokens=9))) as replica:
        route = replica.store.route

        async def slow(*_: Any) -> Any:
            replica.store.route = route
            raise StateSlowError("shared state needs longer")

        replica.store.route = slow
        tokens, _ = await replica.round("a")
        assert tokens == EXPECTED
        assert await replica.store.binding(session_key("", "a")) is None
        await replica.round("b")
        assert await replica.store.binding(session_key("", "b")) is not None


async def test_an_owner_gets_its_next_rounds_before_the_store_has_them_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.placement._BEHIND_S", 3600.0)
    async with Replica(await cluster(worker("d1"))) as replica:
        await replica.round("s")
        await replica.store.publish_worker(worker("d1", held_tokens={session_key("", "s"): len(PROMPT)}), 60.0)
        await asyncio.sleep(0)
        refresh, written = replica.store.refresh, []

        async def noted(writes: Any, limits: Any) -> Any:
            written.append([(write.session_id, write.task) for write in writes])
            return await refresh(writes, limits)

        replica.store.refresh = noted
        calls = replica.store.round_trips.calls["route"]
        for _ in range(2):
            _, record = await replica.round("s")
            assert record["decode_worker"] == "d1"
            assert not written
            await replica.store.publish_worker(worker("d1", held_tokens={session_key("", "s"): len(PROMPT)}), 60.0)
            await asyncio.sleep(0)
        replica.services.placer._write_behind()
        await asyncio.gather(*replica.tasks)
        assert written == [[(session_key("", "s"), None)]], "the later one renews the binding for both"
        assert replica.store.round_trips.calls["route"] == calls + 1
        monkeypatch.undo()
        await replica.round("s")
        await until(lambda: len(written) == 2)


@pytest.fixture
async def settled(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replica]:
    """The next round of its session s writes only when it is told to."""
    monkeypatch.setattr("router.placement._BEHIND_S", 3600.0)
    async with Replica(await cluster(worker("d1"))) as replica:
        await replica.round("s")
        await replica.store.publish_worker(worker("d1", held_tokens={session_key("", "s"): len(PROMPT)}), 60.0)
        await asyncio.sleep(0)
        yield replica


async def test_a_write_that_waits_does_not_bind_a_session_that_has_ended(settled: Replica) -> None:
    await settled.round("s")
    assert settled.services.placer._behind
    await settled.services.end_session(session_key("", "s"), "", set())
    settled.services.placer._write_behind()
    await asyncio.gather(*settled.tasks)
    assert await settled.store.binding(session_key("", "s")) is None


async def test_a_last_round_at_an_owner_that_the_session_has_left_ends_it_at_the_other_one(settled: Replica) -> None:
    await settled.store.rebind(Binding(session_key("", "s"), "d1", 1), "d2", 60.0)
    await settled.round(agent_context={"session_id": "s", "session_final": True})
    assert await settled.store.binding(session_key("", "s")) is not None
    settled.services.placer._write_behind()
    await asyncio.gather(*settled.tasks)
    assert await settled.store.binding(session_key("", "s")) is None


async def test_workers_that_were_lost_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Replica(await cluster(worker("d1"))) as replica:
        placer, now_s = replica.services.placer, 0.0
        monkeypatch.setattr(placer, "_clock", lambda: now_s)
        for number in range(1000):
            now_s = number * placer._suspect_s / 3
            placer.suspect(f"lost-{number}")
        assert len(placer._gone_until_s) <= 4
