"""What every store promises; each test runs on the in-memory twin and on a real Redis."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from ampd.state.redis_store import StateStore
from ampd.state.store import (
    Binding,
    FatalRequestError,
    RouteWrite,
    SessionEnded,
    SessionLimits,
    TaskDone,
    TaskQueued,
    TooManySessionsError,
    WorkerRemoved,
    WorkerUpdated,
)
from ampd.types import Parallelism, Role, Window
from tests.ampd.state.contract_lab import HOSTILE_IDS, LONG_S, SHORT_S, is_falsy
from tests.waiting import until


async def view_of(store: StateStore, worker_id: str) -> Any:
    return next((view for view in await store.snapshot() if view.worker_id == worker_id), None)


class TestClaims:
    async def test_concurrent_claims_leave_every_session_one_worker(self, cluster: Any, make: Any) -> None:
        stores = [await cluster.store() for _ in range(3)]
        sessions = [f"s{number}" for number in range(50)]
        outcomes = await asyncio.gather(
            *(
                store.route(make.write(session, f"d{index}", task_id=f"{session}-{index}"), SessionLimits(LONG_S))
                for session in sessions
                for index, store in enumerate(stores)
            )
        )
        for position, session in enumerate(sessions):
            own = outcomes[3 * position : 3 * position + 3]
            assert [outcome.accepted for outcome in own].count(True) == 1
            assert {outcome.binding for outcome in own} == {await stores[0].binding(session)}
            winner = next(index for index, outcome in enumerate(own) if outcome.accepted)
            assert own[0].binding == Binding(session, f"d{winner}", 1)

    async def test_a_claim_race_enters_only_the_winners_task(self, cluster: Any, make: Any) -> None:
        stores = [await cluster.store() for _ in range(3)]
        for index in range(3):
            await stores[0].publish_worker(make.view(f"d{index}"), LONG_S)
        outcomes = await asyncio.gather(
            *(
                store.route(make.write("s", f"d{index}", task_id=f"t{index}"), SessionLimits(LONG_S))
                for index, store in enumerate(stores)
            )
        )
        queued = [task.task_id for view in await stores[0].snapshot() for task in view.queue]
        assert queued == [f"t{index}" for index, outcome in enumerate(outcomes) if outcome.accepted]

    async def test_refresh_keeps_worker_and_epoch(self, cluster: Any, make: Any) -> None:
        store, other_store = await cluster.store(), await cluster.store()
        claimed = await store.route(make.write(), SessionLimits(LONG_S))
        refreshed = await other_store.route(make.write(epoch=1, task_id="t2"), SessionLimits(LONG_S))
        assert claimed.accepted
        assert refreshed.accepted
        assert claimed.binding == refreshed.binding == Binding("s1", "d1", 1)

    async def test_writes_that_nobody_waits_for_renew_bindings_and_enter_no_task(
        self, cluster: Any, make: Any, waiting: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They return what has moved. A session that is lost is bound again."""
        skipped: list[str] = []
        monkeypatch.setattr("ampd.state.codec.warn_once", skipped.append)
        store = await cluster.store()
        await store.publish_worker(make.view("d1"), LONG_S)
        for name in ("stays", "moves"):
            await store.route(make.write(name, task_id=name), SessionLimits(LONG_S))
        await store.rebind(Binding("moves", "d1", 1), "d2", LONG_S)
        watcher = store.watch()
        await watcher.start()
        writes = [replace(make.write(name, epoch=1), task=None) for name in ("stays", "moves", "lost")]
        assert await store.refresh(writes, SessionLimits(LONG_S)) == [Binding("moves", "d2", 2)]
        assert await store.binding("stays") == Binding("stays", "d1", 1)
        assert await store.binding("lost") == Binding("lost", "d1", 1)
        assert [task.task_id for task in (await view_of(store, "d1")).queue] == ["stays", "moves"]
        await store.end_session("marker")
        assert await waiting.events(watcher, 1) == [SessionEnded("marker")]
        assert not skipped, "no event of a task without a name"
        await watcher.aclose()

    async def test_a_newcomer_that_chose_the_bound_worker_is_accepted(self, cluster: Any, make: Any) -> None:
        store, other_store = await cluster.store(), await cluster.store()
        await store.route(make.write(), SessionLimits(LONG_S))
        await store.rebind(Binding("s1", "d1", 1), "d2", LONG_S)
        outcome = await other_store.route(make.write(worker_id="d2", epoch=0, task_id="t2"), SessionLimits(LONG_S))
        assert outcome.accepted
        assert outcome.binding == Binding("s1", "d2", 2)

    async def test_another_worker_is_refused_with_the_binding_that_holds(self, cluster: Any, make: Any) -> None:
        store, other_store = await cluster.store(), await cluster.store()
        await store.route(make.write(worker_id="d1"), SessionLimits(LONG_S))
        refused = await other_store.route(make.write(worker_id="d2", task_id="t2"), SessionLimits(LONG_S))
        assert not refused.accepted
        assert refused.binding == Binding("s1", "d1", 1)

    async def test_a_refused_route_writes_nothing(self, cluster: Any, make: Any, waiting: Any) -> None:
        store = await cluster.store()
        await store.publish_worker(make.view("d2"), LONG_S)
        await store.route(make.write(worker_id="d1"), SessionLimits(LONG_S))
        watcher = store.watch()
        await watcher.start()
        await store.route(make.write(worker_id="d2", task_id="t2"), SessionLimits(LONG_S))
        await store.end_session("marker")
        assert await waiting.events(watcher, 1) == [SessionEnded("marker")]
        assert (await view_of(store, "d2")).queue == ()
        await watcher.aclose()

    async def test_a_binding_that_was_lost_is_taken_up_again_with_its_epoch(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        outcome = await store.route(make.write(epoch=7), SessionLimits(LONG_S))
        assert outcome.accepted
        assert outcome.binding == Binding("s1", "d1", 7) == await store.binding("s1")

    async def test_bindings_expire_unless_refreshed(self, cluster: Any, make: Any, waiting: Any) -> None:
        store = await cluster.store()
        await store.route(make.write("gone", task_id="t1"), SessionLimits(SHORT_S))
        await store.route(make.write("kept", task_id="t2"), SessionLimits(SHORT_S))
        await store.route(make.write("kept", task_id="t3"), SessionLimits(LONG_S))
        await waiting.until(lambda: is_falsy(store.binding("gone")))
        assert await store.binding("kept") == Binding("kept", "d1", 1)

    async def test_a_session_lives_shorter_until_its_second_round(self, cluster: Any, make: Any, waiting: Any) -> None:
        store = await cluster.store()
        limits = SessionLimits(LONG_S, first_ttl_s=SHORT_S)
        await store.route(make.write("once", task_id="t1"), limits)
        await store.route(make.write("twice", task_id="t2"), SessionLimits(LONG_S))
        await store.route(make.write("twice", task_id="t3"), limits)
        await waiting.until(lambda: is_falsy(store.binding("once")))
        assert await store.binding("twice") == Binding("twice", "d1", 1)

    async def test_live_sessions_are_limited_per_tenant_and_per_graph(self, cluster: Any, make: Any) -> None:
        store, other = await cluster.store(), await cluster.store()
        limits = SessionLimits(LONG_S, per_graph=3, per_tenant=2)

        def write(name: str, tenant: str, epoch: int = 0) -> RouteWrite:
            return replace(make.write(name, epoch=epoch, task_id=f"{name}-{epoch}"), tenant=tenant)

        await store.route(write("a1", "alice"), limits)
        await other.route(write("a2", "alice"), limits)
        with pytest.raises(TooManySessionsError, match="this tenant has 2 live sessions"):
            await other.route(write("a3", "alice"), limits)
        await store.route(write("b1", "bob"), limits)
        with pytest.raises(TooManySessionsError, match="this graph has 3 live sessions"):
            await store.route(write("b2", "bob"), limits)
        assert await store.binding("a3") is await store.binding("b2") is None
        # Those that live go on, and one that the store has lost does, too.
        for name, epoch in (("a1", 0), ("a2", 1), ("lost", 4)):
            assert (await store.route(write(name, "alice", epoch), limits)).accepted
        await store.end_session("a1", "alice")
        await store.end_session("lost", "alice")
        assert (await store.route(write("a3", "alice"), limits)).accepted

    @pytest.mark.parametrize("tenant", ["", "alice"])
    async def test_who_ends_a_session_need_not_know_its_tenant(self, cluster: Any, make: Any, tenant: str) -> None:
        store, other = await cluster.store(), await cluster.store()
        limits = SessionLimits(LONG_S, per_tenant=1)
        for name in ("first", "second"):
            write = replace(make.write(name, task_id=name), tenant=tenant)
            assert (await store.route(write, limits)).accepted
            with pytest.raises(TooManySessionsError, match="this tenant has 1 live session"):
                await other.route(replace(make.write("third", task_id="third"), tenant=tenant), limits)
            await other.end_session(name)

    async def test_a_session_that_expired_makes_room(self, cluster: Any, make: Any, waiting: Any) -> None:
        store = await cluster.store()
        limits = SessionLimits(SHORT_S, per_graph=1)
        await store.route(make.write("first", task_id="t1"), limits)
        await waiting.until(lambda: is_falsy(store.binding("first")))
        assert (await store.route(make.write("second", task_id="t2"), limits)).accepted

    @pytest.mark.parametrize("session_id", HOSTILE_IDS)
    async def test_any_string_is_a_session_id(self, cluster: Any, make: Any, waiting: Any, session_id: str) -> None:
        store = await cluster.store()
        watcher = store.watch()
        await watcher.start()
        await store.publish_worker(make.view("d1", held_tokens={session_id: 42}), LONG_S)
        outcome = await store.route(make.write(session_id), SessionLimits(LONG_S))
        view = await view_of(store, "d1")
        assert outcome.binding == await store.binding(session_id) == Binding(session_id, "d1", 1)
        assert await store.binding(session_id + "?") is None
        assert view.held_tokens == {session_id: 42}
        assert [task.session_id for task in view.queue] == [session_id]
        assert await store.end_session(session_id) == Binding(session_id, "d1", 1)
        assert await store.binding(session_id) is None
        published, queued, ended = await waiting.events(watcher, 3)
        assert published.view.held_tokens == {session_id: 42}
        assert queued.task.session_id == ended.session_id == session_id
        await watcher.aclose()

    async def test_a_worker_ends_no_session_of_another_worker(self, cluster: Any, make: Any) -> None:
        """It tells the end late, and the session may live again by then."""
        store = await cluster.store()
        await store.route(make.write("s1"), SessionLimits(LONG_S))
        for late in (Binding("s1", "d2", 0), Binding("s1", "d2", 1)):
            assert await store.end_session("s1", last=late) == Binding("s1", "d1", 1)
            assert await store.binding("s1") is not None
        await store.end_session("s1", last=Binding("s1", "d1", 1))
        assert await store.binding("s1") is None

    async def test_a_worker_ends_what_was_moved_to_it_while_the_store_was_away(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        await store.route(make.write("s1"), SessionLimits(LONG_S))
        await store.end_session("s1", last=Binding("s1", "d2", 2))
        assert await store.binding("s1") is None

    async def test_a_worker_ends_no_session_that_has_left_it_and_come_back(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        await store.route(make.write("s1", epoch=3), SessionLimits(LONG_S))
        await store.end_session("s1", last=Binding("s1", "d1", 1))
        assert await store.binding("s1") == Binding("s1", "d1", 3)
        await store.end_session("s1", last=Binding("s1", "d1", 0))
        assert await store.binding("s1") is None, "a worker that does not know the epoch"

    async def test_namespaced_lookalikes_do_not_collide(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        await store.route(make.write("workers"), SessionLimits(LONG_S))
        await store.publish_worker(make.view("d1"), LONG_S)
        assert await store.binding("workers") == Binding("workers", "d1", 1)
        assert len(await store.snapshot()) == 1


class TestFencing:
    async def test_rebind_moves_and_counts_up(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        held = (await store.route(make.write(), SessionLimits(LONG_S))).binding
        moved = await store.rebind(held, "d2", LONG_S)
        assert moved.accepted
        assert moved.binding == Binding("s1", "d2", 2) == await store.binding("s1")

    async def test_of_two_rebinds_one_wins(self, cluster: Any, make: Any) -> None:
        stores = [await cluster.store() for _ in range(8)]
        held = (await stores[0].route(make.write(), SessionLimits(LONG_S))).binding
        outcomes = await asyncio.gather(
            *(store.rebind(held, f"d{index + 2}", LONG_S) for index, store in enumerate(stores))
        )
        assert [outcome.accepted for outcome in outcomes].count(True) == 1
        assert {outcome.binding for outcome in outcomes} == {await stores[0].binding("s1")}
        assert outcomes[0].binding.epoch == 2

    async def test_a_repeated_rebind_finds_its_own_work(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        held = (await store.route(make.write(), SessionLimits(LONG_S))).binding
        first = await store.rebind(held, "d2", LONG_S)
        assert await store.rebind(held, "d2", LONG_S) == first

    async def test_the_higher_epoch_wins(self, cluster: Any, make: Any) -> None:
        """A coordinator that lost the store moves sessions alone, and the store still has the older binding."""
        alone, other = await cluster.store(), await cluster.store()
        old = (await other.route(make.write(), SessionLimits(LONG_S))).binding
        outcome = await alone.route(
            make.write(worker_id="d2", epoch=old.epoch + 1, task_id="t2"), SessionLimits(LONG_S)
        )
        assert outcome.accepted
        assert outcome.binding == Binding("s1", "d2", 2) == await other.binding("s1")
        refused = await other.route(make.write(epoch=old.epoch, task_id="t3"), SessionLimits(LONG_S))
        assert not refused.accepted
        assert refused.binding == outcome.binding
        # The same worker with a later epoch: the session moved away and back.
        again = await alone.route(make.write(worker_id="d2", epoch=4, task_id="t4"), SessionLimits(LONG_S))
        assert again.binding == Binding("s1", "d2", 4) == await other.binding("s1")

    async def test_a_newer_binding_than_the_stored_one_can_be_moved(self, cluster: Any, make: Any) -> None:
        alone, other = await cluster.store(), await cluster.store()
        await other.route(make.write(), SessionLimits(LONG_S))
        moved = await alone.rebind(Binding("s1", "d2", 2), "d3", LONG_S)
        assert moved.accepted
        assert moved.binding == Binding("s1", "d3", 3) == await other.binding("s1")
        late = await other.rebind(Binding("s1", "d9", 3), "d4", LONG_S)
        assert not late.accepted
        assert late.binding == moved.binding

    async def test_a_stale_epoch_is_refused(self, cluster: Any, make: Any) -> None:
        store, other_store = await cluster.store(), await cluster.store()
        old = (await store.route(make.write(), SessionLimits(LONG_S))).binding
        moved = (await store.rebind(old, "d2", LONG_S)).binding
        back = (await store.rebind(moved, "d1", LONG_S)).binding
        # the worker is the same again, and still the old epoch is too old
        refused = await other_store.route(make.write(epoch=old.epoch, task_id="t2"), SessionLimits(LONG_S))
        assert not refused.accepted
        assert refused.binding == back == Binding("s1", "d1", 3)
        late = await other_store.rebind(old, "d9", LONG_S)
        assert not late.accepted
        assert late.binding == back

    async def test_rebind_of_a_binding_that_is_gone_takes_it_up(self, cluster: Any) -> None:
        store = await cluster.store()
        outcome = await store.rebind(Binding("s1", "d1", 4), "d2", LONG_S)
        assert outcome.accepted
        assert outcome.binding == Binding("s1", "d2", 5) == await store.binding("s1")


class TestDeaths:
    async def test_a_prompt_is_refused_after_two_deaths_under_it(self, cluster: Any, make: Any) -> None:
        store, other = await cluster.store(), await cluster.store()
        write, limits = replace(make.write(), prompt_digest="p"), SessionLimits(LONG_S)
        assert [await store.record_death("p", death) for death in ("d1 ", "d1 ")] == [1, 1]
        assert (await store.route(write, limits)).accepted
        assert await other.record_death("p", "d2 ") == 2
        with pytest.raises(FatalRequestError, match="2 times"):
            await store.route(write, limits)
        assert (await store.route(replace(write, prompt_digest="another"), limits)).accepted

    async def test_a_prompt_is_refused_for_a_time_that_grows(
        self, cluster: Any, make: Any, waiting: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("ampd.state.redis_store", "tests.memory_store"):
            monkeypatch.setattr(f"{module}.REFUSED_S", SHORT_S)
        store = await cluster.store()
        write, limits = replace(make.write(), prompt_digest="p"), SessionLimits(LONG_S)
        for number in range(2):
            await store.record_death("p", f"d{number}")

        async def is_tried() -> bool:
            try:
                return (await store.route(write, limits)).accepted
            except FatalRequestError:
                return False

        await waiting.until(is_tried)
        for number in range(2, 14):
            await store.record_death("p", f"d{number}")
        await asyncio.sleep(4 * SHORT_S)
        with pytest.raises(FatalRequestError, match="14 times"):
            await store.route(write, limits)


class TestEnding:
    async def test_end_returns_the_binding_once(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        held = (await store.route(make.write(), SessionLimits(LONG_S))).binding
        assert await store.end_session("s1") == held
        assert await store.end_session("s1") is None
        assert await store.binding("s1") is None

    async def test_a_binding_outlives_its_last_round_by_seconds_only(
        self, cluster: Any, make: Any, waiting: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("ampd.state.redis_store", "tests.memory_store"):
            monkeypatch.setattr(f"{module}.ENDING_TTL_S", SHORT_S)
        store = await cluster.store()
        limits = SessionLimits(LONG_S, per_graph=1)
        await store.route(make.write(), limits)
        with pytest.raises(TooManySessionsError):
            await store.route(replace(make.write("another", task_id="t2"), ends_session=True), limits)
        assert (await store.route(replace(make.write(epoch=1, task_id="t3"), ends_session=True), limits)).accepted
        await waiting.until(lambda: is_falsy(store.binding("s1")))
        assert (await store.route(make.write("another", task_id="t4"), limits)).accepted

    async def test_the_end_of_a_session_can_be_read_later(self, cluster: Any, make: Any) -> None:
        store, other = await cluster.store(), await cluster.store()
        assert await other.ended_sessions() == []
        await store.route(make.write(), SessionLimits(LONG_S))
        await store.end_session("s1")
        assert await other.ended_sessions() == ["s1"]

    async def test_end_is_announced_even_without_a_binding(self, cluster: Any, waiting: Any) -> None:
        store = await cluster.store()
        watcher = store.watch()
        await watcher.start()
        await store.end_session("unbound")
        assert await waiting.events(watcher, 1) == [SessionEnded("unbound")]
        await watcher.aclose()


class TestWorkers:
    async def test_a_view_comes_back_whole(self, cluster: Any, make: Any) -> None:
        worker, reader = await cluster.store(), await cluster.store()
        view = make.view(
            "f" * 16,
            Role.PREFILL,
            parallelism=Parallelism(tp=4),
            ttft=Window(0.25, 7),
            itl=Window(0.0125, 9000),
            decode_batch=3,
            decode_context_tokens=4096,
            kv_used_tokens=5000,
            kv_capacity_tokens=10**9,
            max_context_tokens=131072,
            held_tokens={"a": 1, "b": 2},
            label="short prompts",
        )
        await worker.publish_worker(view, LONG_S)
        assert await reader.snapshot() == [view]

    async def test_leases_run_out(self, cluster: Any, make: Any, waiting: Any) -> None:
        store = await cluster.store()
        await store.publish_worker(make.view("short"), SHORT_S)
        await store.publish_worker(make.view("renewed"), SHORT_S)
        await store.publish_worker(make.view("renewed"), LONG_S)
        await waiting.until(lambda: is_falsy(view_of(store, "short")))
        assert [view.worker_id for view in await store.snapshot()] == ["renewed"]

    async def test_a_lease_that_ran_out_is_announced_by_the_next_heartbeat(
        self, cluster: Any, make: Any, waiting: Any
    ) -> None:
        store = await cluster.store()
        await store.publish_worker(make.view('dead "worker"'), SHORT_S)
        await waiting.until(lambda: is_falsy(store.snapshot()))
        watcher = store.watch()
        await watcher.start()
        await store.publish_worker(make.view("alive"), LONG_S)
        await store.publish_worker(make.view("alive"), LONG_S)
        first, second, third = await waiting.events(watcher, 3)
        assert isinstance(first, WorkerUpdated)
        assert second == WorkerRemoved('dead "worker"', is_expired=True)
        assert isinstance(third, WorkerUpdated)
        await watcher.aclose()

    async def test_removal_takes_everything_along(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        await store.publish_worker(make.view("d1"), LONG_S)
        await store.route(make.write(), SessionLimits(LONG_S))
        await store.remove_worker("d1")
        assert await store.snapshot() == []
        await store.publish_worker(make.view("d1"), LONG_S)
        assert await store.snapshot() == [make.view("d1")]

    async def test_no_snapshot_shows_half_a_write(self, cluster: Any, make: Any) -> None:
        worker, reader = await cluster.store(), await cluster.store()

        async def publish() -> None:
            for step in range(200):
                await worker.publish_worker(
                    make.view("d1", decode_batch=step, kv_used_tokens=step, held_tokens={"s": step}), LONG_S
                )

        writing = asyncio.create_task(publish())
        while not writing.done():
            for view in await reader.snapshot():
                assert view.decode_batch == view.kv_used_tokens == view.held_tokens["s"]
        await writing


class TestQueues:
    async def test_entered_tasks_follow_the_workers_own(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        await store.publish_worker(
            make.view("p1", Role.PREFILL, queue=(make.task("own-b"), make.task("own-a"))), LONG_S
        )
        for task_id in ("t1", "t2", "t3"):
            await store.route(make.write(task_id, task_id=task_id, at="p1"), SessionLimits(LONG_S))
            await asyncio.sleep(0.002)  # the order of entry is kept to the millisecond
        assert [task.task_id for task in (await view_of(store, "p1")).queue] == ["own-b", "own-a", "t1", "t2", "t3"]

    async def test_a_task_keeps_what_it_says_of_its_session(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        listed = replace(make.task("listed"), session_missed=True, postponements=2)
        await store.publish_worker(make.view("p1", Role.PREFILL, queue=(listed,)), LONG_S)
        write = make.write(at="p1")
        await store.route(replace(write, task=replace(write.task, session_missed=True)), SessionLimits(LONG_S))
        queue = (await view_of(store, "p1")).queue
        assert [(task.session_missed, task.postponements) for task in queue] == [(True, 2), (True, 0)]

    async def test_a_listed_task_shows_once_in_the_workers_order(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        await store.publish_worker(make.view("p1"), LONG_S)
        await store.route(make.write(task_id="t1", at="p1"), SessionLimits(LONG_S))
        await store.publish_worker(make.view("p1", queue=(make.task("t2"), make.task("t1"))), LONG_S)
        assert [task.task_id for task in (await view_of(store, "p1")).queue] == ["t2", "t1"]

    async def test_a_view_that_does_not_know_a_fresh_task_keeps_it(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        await store.publish_worker(make.view("p1"), LONG_S)
        await store.route(make.write(task_id="t1", at="p1"), SessionLimits(LONG_S))
        await store.publish_worker(make.view("p1"), LONG_S)
        assert [task.task_id for task in (await view_of(store, "p1")).queue] == ["t1"]

    async def test_a_finished_task_goes_at_once_and_stays_gone(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        written_before = make.view("p1", queue=(make.task("t1"), make.task("t2")))
        await store.publish_worker(written_before, LONG_S)
        await store.finish_tasks("p1", ["t1"])
        assert [task.task_id for task in (await view_of(store, "p1")).queue] == ["t2"]
        await store.publish_worker(written_before, LONG_S)
        assert [task.task_id for task in (await view_of(store, "p1")).queue] == ["t2"]

    async def test_what_has_left_a_queue_goes_with_the_next_view(self, cluster: Any, make: Any, waiting: Any) -> None:
        store = await cluster.store()
        await store.publish_worker(make.view("p1"), LONG_S)
        for task_id in ("t1", "t2"):
            await store.route(make.write(task_id=task_id, at="p1"), SessionLimits(LONG_S))
        watcher = store.watch()
        await watcher.start()
        await store.publish_worker(make.view("p1"), LONG_S, ["t1"])
        assert await waiting.events(watcher, 1) == [WorkerUpdated(make.view("p1"), LONG_S, ("t1",))]
        assert [task.task_id for task in (await view_of(store, "p1")).queue] == ["t2"]
        await store.route(make.write(task_id="t1", at="p1"), SessionLimits(LONG_S))
        assert [task.task_id for task in (await view_of(store, "p1")).queue] == ["t2"], "it comes too late"
        await watcher.aclose()

    async def test_a_write_that_lands_after_its_task_is_done_only_binds(self, cluster: Any, make: Any) -> None:
        """Its coordinator has not waited for it: the worker was called all the same."""
        store = await cluster.store()
        await store.publish_worker(make.view("d1"), LONG_S)
        await store.finish_tasks("d1", ["t1"])
        assert (await store.route(make.write(), SessionLimits(LONG_S))).accepted
        assert (await view_of(store, "d1")).queue == ()
        assert await store.binding("s1") == Binding("s1", "d1", 1)

    async def test_arrival_times_move_to_the_readers_clock(self, cluster: Any, make: Any) -> None:
        now = {"writer": 1000.0, "reader": 5.0}
        writer = await cluster.store(clock=lambda: now["writer"])
        reader = await cluster.store(clock=lambda: now["reader"])
        watcher = reader.watch()
        await watcher.start()
        await writer.publish_worker(make.view("p1", queue=(make.task("old", arrival_s=997.0),)), LONG_S)
        (updated,) = [await anext(watcher)]
        assert isinstance(updated, WorkerUpdated)
        assert updated.view.queue[0].arrival_s == pytest.approx(2.0)
        (view,) = await reader.snapshot()
        # what has passed since the writing counts as waiting too, by the store's own clock: at most this test's length
        assert 2.0 - 20.0 < view.queue[0].arrival_s <= 2.0 + 1e-6
        await watcher.aclose()

    async def test_waiting_goes_on_in_the_store(self, cluster: Any, make: Any) -> None:
        store = await cluster.store()
        task = make.task("t1")
        times_s = [time.monotonic()]
        await store.publish_worker(make.view("p1", queue=(task,)), LONG_S)
        times_s.append(time.monotonic())
        await asyncio.sleep(0.05)  # Redis has its own clock
        times_s.append(time.monotonic())
        (view,) = await store.snapshot()
        times_s.append(time.monotonic())
        writing_s, _, reading_s = (later - earlier for earlier, later in pairwise(times_s))
        # The wait in the store counts. Each call asks two clocks, one after the other, and its time lies between both.
        # Redis counts in milliseconds.
        assert abs(view.queue[0].arrival_s - task.arrival_s) <= writing_s + reading_s + 0.002


class TestEvents:
    async def test_every_watcher_sees_all_writers_in_one_order(self, cluster: Any, make: Any, waiting: Any) -> None:
        coordinator, worker = await cluster.store(), await cluster.store()
        watchers = [coordinator.watch(), worker.watch()]
        for watcher in watchers:
            await watcher.start()
        await worker.publish_worker(make.view("d1", held_tokens={"a": 1}), LONG_S)
        write = make.write()
        await coordinator.route(write, SessionLimits(LONG_S))
        await worker.finish_tasks("d1", ["t1"])
        await coordinator.end_session("s1")
        await worker.remove_worker("d1")
        for watcher in watchers:
            events = await waiting.events(watcher, 5)
            assert events[0] == WorkerUpdated(make.view("d1", held_tokens={"a": 1}), LONG_S)
            queued = events[1]
            assert isinstance(queued, TaskQueued)
            assert (queued.worker_id, queued.task.task_id, queued.task.slo) == ("d1", "t1", write.task.slo)
            assert events[2:] == [
                TaskDone("d1", "t1"),
                SessionEnded("s1"),
                WorkerRemoved("d1"),
            ]
            await watcher.aclose()

    async def test_nothing_is_lost_between_start_and_snapshot(self, cluster: Any, make: Any, waiting: Any) -> None:
        reader, writer = await cluster.store(), await cluster.store()
        watcher = reader.watch()
        await watcher.start()
        await writer.publish_worker(make.view("d1"), LONG_S)
        assert await reader.snapshot() == [make.view("d1")]
        assert await waiting.events(watcher, 1) == [WorkerUpdated(make.view("d1"), LONG_S)]
        await watcher.aclose()

    async def test_iterating_starts_a_watcher(self, cluster: Any) -> None:
        store = await cluster.store()
        watcher = store.watch()
        first = asyncio.ensure_future(anext(watcher))

        async def is_heard() -> bool:
            await store.end_session("s1")
            return first.done()

        await until(is_heard)
        assert await first == SessionEnded("s1")
        await watcher.aclose()

    async def test_order_is_kept_under_load(self, cluster: Any, waiting: Any) -> None:
        store = await cluster.store()
        watcher = store.watch()
        await watcher.start()
        sessions = [f"s{number}" for number in range(500)]
        for session_id in sessions:
            await store.end_session(session_id)
        assert [event.session_id for event in await waiting.events(watcher, 500)] == sessions
        await watcher.aclose()


async def test_ping_answers(cluster: Any) -> None:
    store = await cluster.store()
    assert await store.ping() >= 0
