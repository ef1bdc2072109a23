"""The local view: what it shows, when it forgets, and what it does while the store is away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ampd.perf.model import PerformanceModel
from ampd.state.known_worker import QUEUE_GRACE_S
from ampd.state.store import SessionLimits, StateUnavailableError, TaskDone, TaskQueued, WorkerRemoved, WorkerUpdated
from ampd.state.view import ClusterView
from ampd.types import QueueRest, Role, WorkerView
from tests.ampd.policies.routing_lab import PLAIN
from tests.ampd.state.view_queues import queued
from tests.memory_store import MemoryState, MemoryStore, MemoryWatcher

LEASE_S = 5.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Fixture:
    """A view on a memory store with one clock that the test moves, and a second handle that plays everyone else."""

    def __init__(self, model: PerformanceModel | None = None) -> None:
        self.clock = Clock()
        self.state = MemoryState(self.clock)
        self.others = MemoryStore(self.state, self.clock)
        self.view = ClusterView(MemoryStore(self.state, self.clock), lease_s=LEASE_S, clock=self.clock, model=model)

    async def publish(self, view: WorkerView, waiting: Any) -> None:
        seen = self.view.counters.events
        await self.others.publish_worker(view, LEASE_S)
        await waiting.until(lambda: self.view.counters.events > seen)


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


class TestWhatItShows:
    async def test_roles_are_listed_apart(self, cluster: Any, make: Any, waiting: Any) -> None:
        others = await cluster.store()
        await others.publish_worker(make.view("d1"), LEASE_S)
        async with ClusterView(await cluster.store(), lease_s=LEASE_S) as view:
            await others.publish_worker(make.view("p1", Role.PREFILL), LEASE_S)
            await waiting.until(view.prefill)
            assert view.decode() == (make.view("d1"),)
            assert view.prefill() == (make.view("p1", Role.PREFILL),)
            assert view.worker("p1") == make.view("p1", Role.PREFILL)
            assert view.worker("unknown") is None
            assert view.connected
            assert view.age_s() < 60
            await others.remove_worker("d1")
            await waiting.until(lambda: not view.decode())

    async def test_a_mixed_worker_is_in_both_lists_and_once_among_all(
        self, fixture: Any, make: Any, waiting: Any
    ) -> None:
        async with fixture.view as view:
            for name, role in (("d", Role.DECODE), ("m", Role.MIXED), ("p", Role.PREFILL)):
                await fixture.publish(make.view(name, role), waiting)
            assert [worker.worker_id for worker in view.decode()] == ["d", "m"]
            assert [worker.worker_id for worker in view.prefill()] == ["p", "m"]
            assert sorted(worker.worker_id for worker in view.workers()) == ["d", "m", "p"]
            assert [worker.worker_id for worker in view.of_role(Role.DECODE)] == ["d"]
            await fixture.publish(make.view("d", Role.MIXED), waiting)
            assert [worker.worker_id for worker in view.prefill()] == ["p", "d", "m"]

    async def test_nothing_is_copied_until_something_changes(self, fixture: Any, make: Any) -> None:
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        await fixture.others.publish_worker(make.view("d2"), LEASE_S)
        async with fixture.view as view:
            before = view.decode()
            assert view.decode() is before
            view.apply(TaskQueued("d1", make.task()))
            after = view.decode()
            assert after is not before
            assert after[1] is before[1]

    async def test_a_role_change_moves_the_worker(self, fixture: Any, make: Any, waiting: Any) -> None:
        await fixture.others.publish_worker(make.view("w"), LEASE_S)
        async with fixture.view as view:
            await fixture.publish(make.view("w", Role.PREFILL), waiting)
            assert view.decode() == ()
            assert [worker.worker_id for worker in view.prefill()] == ["w"]

    async def test_held_changes_fold_into_the_view(self, fixture: Any, make: Any, waiting: Any) -> None:
        await fixture.others.publish_worker(make.view("d1", held_tokens={"a": 1, "b": 2}), LEASE_S)
        async with fixture.view as view:
            before = view.worker("d1")
            view.holding("d1", "a", 0)
            view.holding("d1", "c", 3)
            assert view.worker("d1").held_tokens == {"b": 2, "c": 3}
            assert before.held_tokens == {"a": 1, "b": 2}
            await fixture.publish(make.view("d1", held_tokens={"c": 4}), waiting)
            assert view.worker("d1").held_tokens == {"c": 4}

    async def test_a_batch_that_is_heard_of_holds_until_the_worker_publishes(
        self, fixture: Any, make: Any, waiting: Any
    ) -> None:
        busy = make.view("d1", decode_batch=2, decode_context_tokens=900)
        await fixture.others.publish_worker(busy, LEASE_S)
        async with fixture.view as view:
            before = view.decode()
            view.holding("d1", "a", 3, (1, 500))
            view.holding("unknown", "a", 3, (1, 500))
            assert (view.decode()[0].decode_batch, view.worker("d1").decode_context_tokens) == (1, 500)
            assert before[0].decode_batch == 2
            await fixture.publish(make.view("d1", decode_batch=3), waiting)
            assert view.worker("d1").decode_batch == 3

    async def test_what_is_written_right_after_the_snapshot_is_not_missed(
        self, fixture: Any, make: Any, waiting: Any
    ) -> None:
        class Racing(MemoryStore):
            async def snapshot(self) -> list[WorkerView]:
                views = await super().snapshot()
                await fixture.others.publish_worker(make.view("late"), LEASE_S)
                return views

        async with ClusterView(Racing(fixture.state, fixture.clock), lease_s=LEASE_S, clock=fixture.clock) as view:
            await waiting.until(view.decode)
            assert [worker.worker_id for worker in view.decode()] == ["late"]


class TestForgetting:
    async def test_a_lease_runs_out(self, fixture: Any, make: Any, waiting: Any) -> None:
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        await fixture.others.publish_worker(make.view("d2"), LEASE_S)
        async with fixture.view as view:
            fixture.clock.now_s += LEASE_S - 1
            await fixture.publish(make.view("d2"), waiting)
            assert len(view.decode()) == 2
            fixture.clock.now_s += 1
            assert [worker.worker_id for worker in view.decode()] == ["d2"]
            assert view.worker("d1") is None
            assert view.counters.expired_workers == 1

    async def test_a_lease_whose_end_another_worker_noticed_is_counted_once(self, fixture: Any, make: Any) -> None:
        for name in ("d1", "d2", "d3"):
            await fixture.others.publish_worker(make.view(name), LEASE_S)
        async with fixture.view as view:
            view.apply(WorkerRemoved("d1", is_expired=True))
            view.apply(WorkerRemoved("d2"))
            assert [worker.worker_id for worker in view.decode()] == ["d1", "d3"], "the store's clock may have jumped"
            fixture.clock.now_s += LEASE_S
            view.apply(WorkerUpdated(make.view("d3"), LEASE_S))
            view.apply(WorkerRemoved("d1", is_expired=True))
            assert [worker.worker_id for worker in view.decode()] == ["d3"]
            view.apply(WorkerRemoved("d1", is_expired=True))
            assert view.counters.expired_workers == 1

    async def test_workers_that_fall_silent_together_are_asked_before_they_go(
        self, fixture: Any, make: Any, waiting: Any
    ) -> None:
        for name in ("d1", "d2", "d3"):
            await fixture.others.publish_worker(make.view(name), LEASE_S)
        await fixture.others.publish_worker(make.view("p1", Role.PREFILL), LEASE_S)
        async with fixture.view as view:
            for name in ("d1", "d2", "d3"):
                fixture.clock.now_s += LEASE_S / 9
                await fixture.publish(make.view(name), waiting)
            fixture.clock.now_s += 2 * LEASE_S
            await fixture.publish(make.view("p1", Role.PREFILL), waiting)
            assert len(view.decode()) == 3, "a publication of another role proves nothing"
            assert sorted(view.overdue()) == ["d1", "d2", "d3"]
            view.drop_overdue("d1")
            view.answered("d2")
            assert [worker.worker_id for worker in view.decode()] == ["d2", "d3"]
            assert view.overdue() == ["d3"]
            await fixture.publish(make.view("d2"), waiting)
            assert [worker.worker_id for worker in view.decode()] == ["d2"], "d3 could have published, too"
            view.drop_overdue("d2")
            assert [worker.worker_id for worker in view.decode()] == ["d2"], "its lease holds"
            assert view.counters.expired_workers == 2

    async def test_an_event_brings_its_own_lease(self, fixture: Any, make: Any, waiting: Any) -> None:
        async with fixture.view as view:
            await fixture.others.publish_worker(make.view("d1"), 3 * LEASE_S)
            await waiting.until(view.decode)
            fixture.clock.now_s += 3 * LEASE_S - 0.1
            await fixture.publish(make.view("d2"), waiting)
            assert view.worker("d1") is not None
            fixture.clock.now_s += 0.1
            assert view.worker("d1") is None

    async def test_a_suspect_is_out_until_it_publishes(self, fixture: Any, make: Any, waiting: Any) -> None:
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        await fixture.others.publish_worker(make.view("d2"), LEASE_S)
        async with fixture.view as view:
            assert len(view.decode()) == 2
            view.suspect("d1", for_s=4)
            assert view.decode() == (make.view("d2"),)
            assert view.worker("d1") is None
            await fixture.publish(make.view("d1"), waiting)
            assert view.worker("d1") == make.view("d1")

    async def test_suspicion_lapses(self, fixture: Any, make: Any) -> None:
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        await fixture.others.publish_worker(make.view("d2"), LEASE_S)
        async with fixture.view as view:
            view.suspect("d1", for_s=2)
            assert len(view.decode()) == 1
            fixture.clock.now_s += 2
            assert len(view.decode()) == 2

    async def test_a_worker_that_leaves_is_logged_with_the_reason_and_the_number_left(
        self, fixture: Any, make: Any, waiting: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("d1", "d2", "d3", "d4"):
            await fixture.others.publish_worker(make.view(name), LEASE_S)
        async with fixture.view as view:
            assert len(view.decode()) == 4
            view.suspect("d1", for_s=60)
            assert len(view.decode()) == 3
            seen = view.counters.events
            await fixture.others.remove_worker("d2")
            await waiting.until(lambda: view.counters.events > seen)
            assert len(view.decode()) == 2
            fixture.clock.now_s += LEASE_S - 1
            await fixture.publish(make.view("d3"), waiting)
            fixture.clock.now_s += 1
            assert len(view.decode()) == 1
        assert [message.partition(" leaves the view: ")[2] for message in caplog.messages] == [
            "a call to it failed; left: 3 decode",
            "it has left by itself; left: 2 decode",
            "its lease is over, and it does not answer or others publish; left: 1 decode",
        ]

    async def test_other_news_do_not_clear_a_suspect(self, fixture: Any, make: Any) -> None:
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        await fixture.others.publish_worker(make.view("d2"), LEASE_S)
        async with fixture.view as view:
            view.suspect("d1", for_s=2)
            view.apply(TaskQueued("d1", make.task()))
            view.holding("d1", "s1", 3)
            assert view.decode() == (make.view("d2"),)

    @pytest.mark.parametrize(
        ("roles", "listed"),
        [
            ({"d1": Role.DECODE}, {"d1"}),
            ({"p1": Role.PREFILL}, {"p1"}),
            ({"d1": Role.DECODE, "p1": Role.PREFILL}, {"d1", "p1"}),
            ({"m1": Role.MIXED}, {"m1"}),
            ({"d1": Role.DECODE, "d2": Role.DECODE}, {"d1", "d2"}),
            ({"d1": Role.DECODE, "trusted": Role.DECODE}, {"trusted"}),
            ({"d1": Role.DECODE, "p1": Role.PREFILL, "trusted": Role.MIXED}, {"trusted"}),
            ({"m1": Role.MIXED, "trusted": Role.DECODE}, {"m1", "trusted"}),
            ({"m1": Role.MIXED, "p1": Role.PREFILL, "trusted": Role.DECODE}, {"m1", "p1", "trusted"}),
        ],
    )
    async def test_suspects_stay_while_nobody_else_does_their_work(
        self, fixture: Any, make: Any, roles: dict[str, Role], listed: set[str]
    ) -> None:
        for worker_id, role in roles.items():
            await fixture.others.publish_worker(make.view(worker_id, role), LEASE_S)
        async with fixture.view as view:
            for worker_id in roles:
                if worker_id != "trusted":
                    view.suspect(worker_id, for_s=2)
            assert {worker.worker_id for worker in view.workers()} == listed
            assert {worker_id for worker_id in roles if view.worker(worker_id)} == listed

    async def test_the_last_worker_goes_with_its_lease_although_it_stays_as_a_suspect(
        self, fixture: Any, make: Any
    ) -> None:
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        async with fixture.view as view:
            view.suspect("d1", for_s=60)
            assert len(view.decode()) == 1
            fixture.clock.now_s += LEASE_S
            view.drop_overdue("d1")
            assert view.decode() == ()
            assert view.worker("d1") is None


class TestQueues:
    async def test_an_older_view_does_not_drop_a_fresh_task(self, fixture: Any, make: Any, waiting: Any) -> None:
        await fixture.others.publish_worker(make.view("p1"), LEASE_S)
        async with fixture.view as view:
            view.apply(TaskQueued("p1", make.task("t1")))
            await fixture.publish(make.view("p1"), waiting)
            assert queued(view, "p1") == ["t1"]

    async def test_a_task_that_its_worker_never_lists_is_dropped_after_the_grace(
        self, fixture: Any, make: Any, waiting: Any
    ) -> None:
        await fixture.others.publish_worker(make.view("p1"), LEASE_S)
        async with fixture.view as view:
            view.apply(TaskQueued("p1", make.task("t1")))
            fixture.clock.now_s += 2.1
            assert queued(view, "p1") == ["t1"]
            await fixture.publish(make.view("p1"), waiting)
            assert queued(view, "p1") == []
            assert view.counters.lost_tasks == 1

    async def test_a_task_that_is_not_listed_counts_among_the_rest_soon_and_is_not_lost(
        self, fixture: Any, make: Any, waiting: Any
    ) -> None:
        long = replace(make.view("p1"), queue_rest=QueueRest(3, 0, 300))
        await fixture.others.publish_worker(long, LEASE_S)
        async with fixture.view as view:
            view.apply(TaskQueued("p1", make.task("t1")))
            await fixture.publish(long, waiting)
            assert queued(view, "p1") == ["t1"]  # it may be on its way
            fixture.clock.now_s += 0.6
            await fixture.publish(long, waiting)
            assert queued(view, "p1") == []
            assert view.decode()[0].queued_prefills == 3
            assert view.counters.lost_tasks == 0

    async def test_a_listed_task_goes_when_it_is_no_longer_listed(self, fixture: Any, make: Any, waiting: Any) -> None:
        await fixture.others.publish_worker(make.view("p1"), LEASE_S)
        async with fixture.view as view:
            view.apply(TaskQueued("p1", make.task("t1")))
            await fixture.publish(make.view("p1", queue=(make.task("t1"),)), waiting)
            assert queued(view, "p1") == ["t1"]
            await fixture.publish(make.view("p1"), waiting)
            assert queued(view, "p1") == []

    async def test_a_view_tells_what_has_left_the_queue(self, fixture: Any, make: Any) -> None:
        await fixture.others.publish_worker(make.view("p1"), LEASE_S)
        async with fixture.view as view:
            view.apply(TaskQueued("p1", make.task("t1")))
            view.apply(TaskQueued("p1", make.task("t2")))
            assert [task.task_id for task in view.workers()[0].queue] == ["t1", "t2"]
            view.apply(WorkerUpdated(make.view("p1"), LEASE_S, ("t1",)))
            assert [task.task_id for task in view.worker("p1").queue] == ["t2"]
            assert [task.task_id for task in view.workers()[0].queue] == ["t2"]

    async def test_a_done_task_goes_at_once_and_an_older_view_does_not_revive_it(
        self, fixture: Any, make: Any, waiting: Any
    ) -> None:
        written_before = make.view("p1", queue=(make.task("t1"), make.task("t2")))
        await fixture.others.publish_worker(written_before, LEASE_S)
        async with fixture.view as view:
            view.apply(TaskDone("p1", "t1"))
            assert queued(view, "p1") == ["t2"]
            await fixture.publish(written_before, waiting)
            assert queued(view, "p1") == ["t2"]

    async def test_a_write_that_lands_after_its_prefill_was_done_does_not_list_it(
        self, fixture: Any, make: Any, waiting: Any
    ) -> None:
        """The coordinator gave up waiting for this write, served the round without it, and hears of it afterwards."""
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        async with fixture.view as view:
            late, after = make.write(), make.write(session_id="s2", task_id="t2")
            view.apply(TaskQueued("d1", late.task))
            view.apply(TaskDone("d1", "t1"))
            for write in (late, after):
                await fixture.others.route(write, SessionLimits(60))
            await waiting.until(lambda: "t2" in queued(view, "d1"))
            assert queued(view, "d1") == ["t2"]

    async def test_ones_own_write_and_its_echo_count_once(self, fixture: Any, make: Any, waiting: Any) -> None:
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        async with fixture.view as view:
            write = make.write()
            view.apply(TaskQueued("d1", write.task))
            seen = view.counters.events
            await fixture.others.route(write, SessionLimits(60))
            await waiting.until(lambda: view.counters.events > seen)
            assert queued(view, "d1") == ["t1"]


class TestStoreLoss:
    async def test_the_first_start_reports_a_store_that_is_away(self, fixture: Any) -> None:
        fixture.state.lose()
        with pytest.raises(StateUnavailableError):
            await fixture.view.start()
        assert not fixture.view.connected

    async def test_the_last_view_is_served_and_leases_stand_still(self, fixture: Any, make: Any, waiting: Any) -> None:
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        async with fixture.view as view:
            fixture.state.lose()
            await waiting.until(lambda: not view.connected)
            fixture.clock.now_s += 10 * LEASE_S
            assert [worker.worker_id for worker in view.decode()] == ["d1"]
            assert view.age_s() == pytest.approx(10 * LEASE_S)
            assert view.counters.losses == 1

    async def test_queues_are_forgotten_while_the_store_is_lost(self, make: Any, waiting: Any) -> None:
        """Otherwise what waited at the loss would keep new sessions out until the store is back."""
        fixture = Fixture()
        tasks = tuple(make.task(name, arrival_s=fixture.clock.now_s) for name in ("t1", "t2"))
        await fixture.others.publish_worker(make.view("p1", Role.PREFILL, queue=tasks), LEASE_S)
        async with fixture.view as view:
            assert queued(view, "p1") == ["t1", "t2"], "the worker itself says what waits"
            fixture.state.lose()
            await waiting.until(lambda: not view.connected)
            assert queued(view, "p1") == []
            view.apply(TaskQueued("p1", make.task("own")))
            assert queued(view, "p1") == ["own"]
            fixture.state.restore()
            await waiting.until(lambda: view.connected)
            assert queued(view, "p1") == ["t1", "t2", "own"]

    async def test_a_copy_that_never_followed_a_store_keeps_its_queues(self, make: Any) -> None:
        """Such copies are given their events, as the one in which the time of decisions is measured."""
        fixture = Fixture(model=PLAIN)
        fixture.view.apply(WorkerUpdated(make.view("p1", Role.PREFILL, queue=(make.task("t1"),)), LEASE_S))
        assert queued(fixture.view, "p1") == ["t1"]

    async def test_workers_are_asked_while_the_store_is_lost(self, fixture: Any, make: Any, waiting: Any) -> None:
        for name in ("d1", "d2"):
            await fixture.others.publish_worker(make.view(name), LEASE_S)
        async with fixture.view as view:
            fixture.state.lose()
            await waiting.until(lambda: not view.connected)
            assert view.overdue() == []
            fixture.clock.now_s += LEASE_S
            assert sorted(view.overdue()) == ["d1", "d2"]
            view.drop_overdue("d1")
            view.answered("d2")
            assert [worker.worker_id for worker in view.decode()] == ["d2"]
            assert view.overdue() == ["d1"], "nothing else can bring it back"
            view.answered("d1")
            assert {worker.worker_id for worker in view.decode()} == {"d1", "d2"}
            assert view.overdue() == []

    async def test_no_lease_runs_out_while_the_store_is_silent(self, fixture: Any, make: Any) -> None:
        class Silent(MemoryWatcher):
            heard_s = fixture.clock()

            def silent_s(self) -> float:
                return float(fixture.clock() - Silent.heard_s)

        class SilentStore(MemoryStore):
            def watch(self) -> MemoryWatcher:
                return Silent(fixture.state, fixture.clock)

        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        await fixture.others.publish_worker(make.view("d2"), LEASE_S)
        store = SilentStore(fixture.state, fixture.clock)
        async with ClusterView(store, lease_s=LEASE_S, clock=fixture.clock) as view:
            fixture.clock.now_s += 3 * LEASE_S  # still connected: that the store hangs has not been noticed yet
            assert view.connected
            assert [worker.worker_id for worker in view.decode()] == ["d1", "d2"]
            assert view.overdue() == []
            Silent.heard_s = fixture.clock()  # it was heard again, and without a renewal of d1
            view.apply(WorkerUpdated(make.view("d2"), LEASE_S))
            assert [worker.worker_id for worker in view.decode()] == ["d2"]
            assert view.counters.expired_workers == 1

    async def test_suspects_and_own_tasks_still_count_while_it_is_away(
        self, fixture: Any, make: Any, waiting: Any
    ) -> None:
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        await fixture.others.publish_worker(make.view("d2"), LEASE_S)
        async with fixture.view as view:
            fixture.state.lose()
            await waiting.until(lambda: not view.connected)
            view.suspect("d2", for_s=60)
            view.apply(TaskQueued("d1", make.task("t1")))
            assert [worker.worker_id for worker in view.decode()] == ["d1"]
            assert queued(view, "d1") == ["t1"]

    async def test_after_a_loss_the_queues_are_those_of_the_store(self, make: Any, waiting: Any) -> None:
        """With what the reader entered just before. It may still be on its way to its worker."""
        fixture = Fixture()
        await fixture.others.publish_worker(make.view("p1", Role.PREFILL, queue=(make.task("before"),)), LEASE_S)
        async with fixture.view as view:
            fixture.state.lose()
            await waiting.until(lambda: not view.connected)
            for task_id in ("waits", "done", "listed"):
                view.apply(TaskQueued("p1", make.task(task_id)))
            view.apply(TaskDone("p1", "done"))
            assert queued(view, "p1") == ["waits", "listed"]
            fixture.clock.now_s += QUEUE_GRACE_S + 0.1
            view.apply(TaskQueued("p1", make.task("new")))
            fixture.state.lost = False
            await fixture.others.publish_worker(make.view("p1", Role.PREFILL, queue=(make.task("listed"),)), LEASE_S)
            await waiting.until(lambda: view.connected)
            assert queued(view, "p1") == ["listed", "new"]
            assert view.counters.lost_tasks == 0
            await fixture.publish(make.view("p1", Role.PREFILL, queue=(make.task("new"),)), waiting)
            assert queued(view, "p1") == ["new"]
            view.apply(TaskDone("p1", "new"))
            await fixture.publish(make.view("p1", Role.PREFILL, queue=(make.task("new"),)), waiting)
            assert queued(view, "p1") == [], "that view was written before"

    async def test_a_long_loss_gathers_nothing(self, fixture: Any, make: Any, waiting: Any) -> None:
        await fixture.others.publish_worker(make.view("p1", Role.PREFILL), LEASE_S)
        async with fixture.view as view:
            fixture.state.lose()
            await waiting.until(lambda: not view.connected)
            for number in range(10):
                view.apply(TaskQueued("p1", make.task(f"t{number}")))
                view.apply(TaskDone("p1", f"t{number}"))
                fixture.clock.now_s += QUEUE_GRACE_S + 0.1
            assert list(view._workers["p1"]._done) == ["t9"]

    async def test_a_store_that_comes_back_empty_does_not_empty_the_view(
        self, fixture: Any, make: Any, waiting: Any
    ) -> None:
        for worker_id in ("back", "dead"):
            await fixture.others.publish_worker(make.view(worker_id), LEASE_S)
        async with fixture.view as view:
            fixture.state.lose()
            await waiting.until(lambda: not view.connected)
            fixture.clock.now_s += 60
            fixture.state.restore(empty=True)
            await waiting.until(lambda: view.connected)
            assert view.counters.losses == 1
            assert {worker.worker_id for worker in view.decode()} == {"back", "dead"}
            fixture.clock.now_s += LEASE_S - 1
            await fixture.publish(make.view("back"), waiting)
            fixture.clock.now_s += 1
            assert {worker.worker_id for worker in view.decode()} == {"back"}

    async def test_what_happened_meanwhile_is_in_the_fresh_snapshot(
        self, fixture: Any, make: Any, waiting: Any
    ) -> None:
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        async with fixture.view as view:
            fixture.state.lose()
            await waiting.until(lambda: not view.connected)
            fixture.state.lost = False
            await fixture.others.publish_worker(make.view("d1", decode_batch=9, held_tokens={"s": 1}), LEASE_S)
            await waiting.until(lambda: view.connected)
            assert view.worker("d1") == make.view("d1", decode_batch=9, held_tokens={"s": 1})

    async def test_a_suspect_stays_one_over_a_snapshot(self, fixture: Any, make: Any, waiting: Any) -> None:
        await fixture.others.publish_worker(make.view("d1"), LEASE_S)
        await fixture.others.publish_worker(make.view("d2"), LEASE_S)
        async with fixture.view as view:
            view.suspect("d1", for_s=60)
            fixture.state.lose()
            await waiting.until(lambda: not view.connected)
            fixture.state.restore()
            await waiting.until(lambda: view.connected)
            assert view.decode() == (make.view("d2"),)
