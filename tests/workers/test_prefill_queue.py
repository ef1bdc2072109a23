"""The prefill queue: order, overlap, slots, and cancellation at any moment."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.base import OrderingPolicy, OrderingSituation, Pick, Run
from ampd.policies.registry import create
from ampd.serving.prefill_queue import CONCURRENCY, PREFETCH, QueueEntry, Stage
from ampd.types import Parallelism, PrefillTask, Slo
from ampd.wire import retry_after_s
from tests.waiting import PATIENCE_S
from workers import prefill_queue
from workers.prefill_queue import AsyncPrefillQueue, PrefillRefusedError

MODEL = load_performance_model("tiny-cpu")


def task(name: str, incr_tokens: int = 100, arrival_s: float = 0.0, ttft_s: float = 1.0) -> PrefillTask:
    return PrefillTask(name, name, 0, incr_tokens, arrival_s, Slo(ttft_s, 0.1))


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@dataclass
class RandomOrdering:
    """Picks anywhere, and keeps every question and answer."""

    rng: random.Random
    asked: list[tuple[list[str], str, list[str]]] = field(default_factory=list)

    def pick(self, situation: OrderingSituation) -> Pick:
        index = self.rng.randrange(len(situation.queue))
        names = [task.task_id for task in situation.queue]
        self.asked.append((names, names[index], names[:index]))
        return Run(index, tuple(range(index)))


class LoggedQueue(AsyncPrefillQueue):
    """Logs each turn at the moment when it comes; the owners wake up a little later."""

    log: list[tuple[str, str]]

    def enter(self, task: PrefillTask, fetches: bool, on_turn: Callable[[QueueEntry], None]) -> QueueEntry:
        def logged(entry: QueueEntry) -> None:
            self.log.append(("picked" if entry.stage is Stage.FETCHING else "started", entry.task.task_id))
            on_turn(entry)

        return super().enter(task, fetches, logged)


def logged_queue(log: list[tuple[str, str]], ordering: OrderingPolicy | None = None) -> LoggedQueue:
    queue = LoggedQueue(ordering or create("ordering", "fcfs"), MODEL, Parallelism())
    queue.log = log
    return queue


class Owner:
    """A handler's part: waits its turn, reads, computes; `read` and `computed` let it go on."""

    def __init__(self, queue: AsyncPrefillQueue, name: str, fetches: bool, log: list[tuple[str, str]]) -> None:
        self.name = name
        self.read, self.computed = asyncio.Event(), asyncio.Event()
        self._queue, self._fetches, self._log = queue, fetches, log
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        with self._queue.place(task(self.name), self._fetches) as entry:
            await entry.picked()
            if self._fetches:
                await self.read.wait()
            await entry.slot()
            await self.computed.wait()
        self._log.append(("done", self.name))


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    actions=st.lists(st.sampled_from(["enter", "enter-fetching", "read", "compute", "cancel"]), max_size=60),
)
def test_everybody_who_stays_runs_once_and_slots_are_never_exceeded(seed: int, actions: list[str]) -> None:
    asyncio.run(play(random.Random(seed), actions))


async def play(rng: random.Random, actions: list[str]) -> None:
    ordering = RandomOrdering(rng)
    owners: list[Owner] = []
    log: list[tuple[str, str]] = []
    queue = logged_queue(log, ordering)
    cancelled: set[str] = set()

    def names(event: str) -> list[str]:
        return [name for what, name in log if what == event]

    async def check() -> None:
        await settle()
        computing = [name for name in names("started") if name not in names("done") and name not in cancelled]
        ahead = [name for name in names("picked") if name not in names("started") and name not in cancelled]
        assert len(computing) <= CONCURRENCY
        assert len(computing) + len(ahead) <= CONCURRENCY + PREFETCH

    for action in actions:
        alive = [owner for owner in owners if not owner.task.done()]
        if action.startswith("enter"):
            owners.append(Owner(queue, f"t{len(owners)}", action == "enter-fetching", log))
        elif alive:
            owner = rng.choice(alive)
            if action == "read":
                owner.read.set()
            elif action == "compute":
                owner.computed.set()
            else:
                owner.task.cancel()
                cancelled.add(owner.name)
        await check()

    for owner in owners:
        owner.read.set()
        owner.computed.set()
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*(owner.task for owner in owners), return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    finished = names("done")
    stayed = {owner.name for owner in owners if not owner.task.cancelled()}
    assert {owner.name for owner in owners} - stayed <= cancelled
    assert set(finished) == stayed
    assert len(set(finished)) == len(finished)
    assert len(names("started")) == len(set(names("started")))
    # They start in the order in which they were picked ...
    assert [name for name in names("picked") if name in names("started")] == names("started")
    # ... and every pick was an answer of the policy, in the order of its answers.
    answers = iter(answer for _, answer, _ in ordering.asked)
    assert all(any(name == answer for answer in answers) for name in names("picked"))
    assert len(queue) == 0
    assert queue.tasks() == ()


async def test_the_next_read_overlaps_the_running_prefill() -> None:
    log: list[tuple[str, str]] = []
    queue = logged_queue(log)
    owners = [Owner(queue, name, True, log) for name in "abc"]
    await settle()
    owners[0].read.set()
    await settle()
    assert log == [("picked", "a"), ("picked", "b"), ("started", "a")]
    owners[1].read.set()
    await settle()
    assert ("started", "b") not in log, "one slot"
    assert ("picked", "c") not in log, "one read ahead"
    owners[0].computed.set()
    await settle()
    assert log[3:] == [("started", "b"), ("picked", "c"), ("done", "a")]
    for owner in owners[1:]:
        owner.task.cancel()
    await asyncio.gather(*(owner.task for owner in owners), return_exceptions=True)


async def test_a_prefill_without_a_read_is_not_chosen_before_there_is_a_slot() -> None:
    log: list[tuple[str, str]] = []
    queue = logged_queue(log)
    owners = [Owner(queue, name, False, log) for name in "ab"]
    await settle()
    assert log == [("picked", "a"), ("started", "a")]
    for owner in owners:
        owner.computed.set()
    await asyncio.gather(*(owner.task for owner in owners))
    assert [name for what, name in log if what == "started"] == ["a", "b"]


async def test_postponements_are_counted_and_shown() -> None:
    late = task("long", incr_tokens=50_000, ttft_s=0.001)
    queue = AsyncPrefillQueue(create("ordering", "ampd"), MODEL, Parallelism(), clock=lambda: 0.0)
    with queue.place(task("first"), False) as first:
        await first.picked()
        await first.slot()
        with queue.place(late, False), queue.place(task("short", incr_tokens=10), False) as short:
            first.leave()
            await short.picked()
            shown = {queued.task_id: queued.postponements for queued in queue.tasks()}
            assert shown == {"short": 0, "long": 1}


@pytest.mark.parametrize("stage", list(Stage)[:4])
async def test_cancelling_in_any_stage_makes_room(stage: Stage) -> None:
    log: list[tuple[str, str]] = []
    queue = logged_queue(log)
    owners = [Owner(queue, name, True, log) for name in "abcd"]
    await settle()
    victim = {Stage.COMPUTING: 0, Stage.READY: 1, Stage.FETCHING: 1, Stage.WAITING: 2}[stage]
    if stage is not Stage.FETCHING:
        owners[0].read.set()
        owners[1].read.set()
        await settle()
    owners[victim].task.cancel()
    for owner in owners:
        owner.read.set()
        owner.computed.set()
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*(owner.task for owner in owners), return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [n == victim for n in range(4)]
    assert [name for what, name in log if what == "done"] == [o.name for n, o in enumerate(owners) if n != victim]
    assert len(queue) == 0


async def test_changes_are_told() -> None:
    told = []
    queue = AsyncPrefillQueue(
        create("ordering", "fcfs"), MODEL, Parallelism(), on_change=lambda: told.append(len(queue.tasks()))
    )
    with queue.place(task("a"), False):
        assert told[-1] == 1
    assert told[-1] == 0


class Failing:
    """An ordering that raises, or picks what does not exist."""

    def __init__(self, pick: Pick | None) -> None:
        self._pick = pick

    def pick(self, _: OrderingSituation) -> Pick:
        if self._pick is None:
            raise ZeroDivisionError("no idea")
        return self._pick


@pytest.mark.parametrize("pick", [None, Run(7), Run(0, together=(5,)), Run(-1)])
async def test_a_failing_policy_does_not_block_the_queue(pick: Pick | None, caplog: pytest.LogCaptureFixture) -> None:
    log: list[tuple[str, str]] = []
    queue = logged_queue(log, Failing(pick))
    owners = [Owner(queue, name, False, log) for name in "abc"]
    for owner in owners:
        await settle()
        owner.computed.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(owner.task for owner in owners))
    assert [name for event, name in log if event == "done"] == ["a", "b", "c"]
    assert len(queue) == 0
    failures = [record for record in caplog.records if "ordering policy failed" in record.getMessage()]
    assert len(failures) == 1


async def test_a_prefill_that_cannot_enter_leaves_nothing() -> None:
    def fail() -> None:
        raise RuntimeError("changed")

    queue = AsyncPrefillQueue(create("ordering", "fcfs"), MODEL, Parallelism(), on_change=fail)
    with pytest.raises(RuntimeError, match="changed"), queue.place(task("a"), fetches=False):
        pass
    assert len(queue) == 0


async def test_a_prefill_that_waits_far_too_long_is_given_up_and_one_that_was_picked_is_not() -> None:
    now_s = 10.0
    queue = AsyncPrefillQueue(
        create("ordering", "fcfs"), MODEL, Parallelism(1), clock=lambda: now_s, patience_s=lambda task: task.slo.ttft_s
    )
    with queue.place(task("runs", arrival_s=0.0), fetches=False) as runs:
        await runs.picked()
        late = task("waits", arrival_s=0.0)
        with queue.place(late, fetches=False) as waits:
            now_s = 20.0
            with pytest.raises(PrefillRefusedError, match=r"10.0 s") as refused:
                await waits.picked()
        assert (refused.value.status, retry_after_s(str(refused.value))) == (429, 1)
        await runs.slot()
        assert [each.task_id for each in queue.tasks()] == ["runs"]
    assert queue.dropped == {"patience": 1}
    assert len(queue) == 0


async def test_a_prefill_that_waited_long_elsewhere_still_waits_for_its_turn() -> None:
    """A lost worker has held it up."""
    queue = AsyncPrefillQueue(
        create("ordering", "fcfs"), MODEL, Parallelism(1), clock=lambda: 100.0, patience_s=lambda _: PATIENCE_S
    )
    with queue.place(task("runs", arrival_s=0.0), fetches=False) as runs:
        await runs.picked()
        with queue.place(task("resumed", arrival_s=-PATIENCE_S), fetches=False) as resumed:
            waiting = asyncio.ensure_future(resumed.picked())
            await settle()
            assert not waiting.done()
            await runs.slot()
            runs.leave()
            await waiting
    assert not queue.dropped


async def test_a_full_queue_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_queue, "MOST_ROUNDS", 2)
    queue = AsyncPrefillQueue(create("ordering", "fcfs"), MODEL, Parallelism(1))

    def enter_one_more() -> None:
        with queue.place(task("more"), fetches=False):
            pass

    first, second = queue.place(task("1"), fetches=False), queue.place(task("2"), fetches=False)
    with first, second, pytest.raises(PrefillRefusedError, match="2 prefills wait"):
        enter_one_more()
    monkeypatch.setattr(prefill_queue, "MOST_TOKENS", 150)
    large = queue.place(task("large", incr_tokens=1000), fetches=False)  # alone it may be of any size
    large_again = queue.place(task("large", incr_tokens=1000), fetches=False)
    with large, pytest.raises(PrefillRefusedError, match="1100 tokens"):
        enter_one_more()
    with large_again, queue.place(replace(task("resumed"), has_output=True), fetches=False):
        assert len(queue) == 2  # its client would lose what it has
    enter_one_more()
    assert queue.dropped == {"queue-full": 2}
    assert len(queue) == 0
