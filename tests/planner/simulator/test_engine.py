"""Nobody waits for what is free: engines admit as soon as memory allows, queues start as soon as a slot is free."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heappop
from math import inf
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from ampd.policies.base import SlicingSituation
from ampd.serving.prefill_queue import CONCURRENCY, PrefillQueue, Stage
from ampd.types import Parallelism, PrefillTask
from planner.simulator.engine import LONGEST_RUN_STEPS, SimulatedEngine
from planner.simulator.kv_memory import KvMemory
from planner.simulator.options import Cluster, EventLoop, Policies, SimulationOptions
from planner.simulator.request import SimulatedRequest
from tests.ampd.serving.fixed_slices import FixedSlices
from workloads.trace import Session

from .lab import (
    LOCAL,
    MODEL,
    SLO,
    RouteBy,
    clusters,
    options,
    policies,
    run,
    session,
    session_lists,
    single,
    steps_at_once,
    world_of,
)

relaxed = settings(max_examples=40, suppress_health_check=list(HealthCheck))


def test_memory_that_a_peers_read_sets_free_is_used_at_the_next_step() -> None:
    """`reads` holds room at the decode worker only while it is read; `waits` needs that room."""
    reads = session("reads", (990, 10), (100, 2), tool_s=1.0)
    long = session("long", (100, 1400), arrival_s=0.5)
    waits = session("waits", (900, 10), arrival_s=1.5)
    slow_reads = SimulationOptions(kv_read_s=1.0)
    second_remote = RouteBy(lambda index: index == 1).policies()
    for steps in (1, LONGEST_RUN_STEPS):
        with steps_at_once(steps):
            done = run([reads, long, waits], single(1, 3000), second_remote, slow_reads)
        (record,) = [record for record in done.rounds if record.session_id == "waits"]
        assert record.ttft_s is not None
        assert 0.5 < record.ttft_s < 1.5


def test_a_round_that_does_not_fit_now_waits_for_one_that_ends() -> None:
    sessions = [session("one", (1000, 200)), session("two", (1000, 10), arrival_s=0.001)]
    one_slot, two_slots = (
        {record.session_id: record for record in run(sessions, single(1, capacity, prefill=0), LOCAL).rounds}
        for capacity in (1300, 5000)
    )
    assert one_slot["two"].ttft_s is not None
    assert two_slots["two"].ttft_s is not None
    assert one_slot["one"].e2e_s is not None
    assert one_slot["two"].ttft_s > one_slot["one"].e2e_s - 0.01
    assert two_slots["two"].ttft_s < one_slot["one"].e2e_s / 2


@pytest.mark.parametrize(("held_tokens", "behind_tokens"), [(96, 96 + 48), (0, 0)])
def test_kv_that_was_read_counts_only_behind_a_history_that_is_still_there(
    held_tokens: int, behind_tokens: int
) -> None:
    world, memory = world_of(LOCAL), KvMemory(1000, 16)
    if held_tokens:
        assert memory.reserve("s", held_tokens)
        memory.settle("s", held_tokens)
    engine = SimulatedEngine("w", Parallelism(1), memory, world)
    ends_s: list[float] = []
    engine.submit(SimulatedRequest("s", 200, 96, 1, None, lambda _, now_s: ends_s.append(now_s), read_tokens=48))
    world.loop.run()
    assert ends_s == [pytest.approx(MODEL.prefill_s(behind_tokens, 200 - behind_tokens, Parallelism(1)))]


@pytest.mark.parametrize(("cached_tokens", "asked", "rounds"), [(992, [1000], 2), (0, [2001, 1001], 1)])
def test_a_round_whose_kv_was_lost_on_the_way_is_a_prefill(cached_tokens: int, asked: list[int], rounds: int) -> None:
    """Its prefill is cut as the policy says, and the policy does not count it among the rounds that decode."""
    policy, memory = Asked(1008), KvMemory(10_000, 16)
    world = world_of(replace(LOCAL, slicing=policy))
    engine = SimulatedEngine("w", Parallelism(1), memory, world)
    task = PrefillTask("t", "t", 0, 1000, 0.0, SLO)
    if cached_tokens:
        assert memory.reserve("over", cached_tokens)
        memory.settle("over", cached_tokens)

    def submit(session_id: str, prompt: int, cached: int, output: int, token_s: float | None = None) -> None:
        request = SimulatedRequest(session_id, prompt, cached, output, None, lambda *_: None, task=task)
        if token_s is not None:
            request.hand_over(token_s)
        engine.submit(request)

    submit("stream", 50, 0, 100)
    world.loop.run(MODEL.prefill_s(0, 50, Parallelism(1)))
    policy.asked.clear()
    submit("other", 1000, 0, 1)
    submit("over", 1001, cached_tokens, 5, token_s=0.0)
    world.loop.run()
    assert [task.incr_tokens for task, _ in policy.asked] == asked
    assert policy.asked[0][1] == rounds


@dataclass
class Asked(FixedSlices):
    """It notes each prefill that it is asked about, and how many rounds decode."""

    asked: list[tuple[PrefillTask, int]] = field(default_factory=list)

    def slice(self, situation: SlicingSituation) -> int:
        self.asked.append((situation.task, len(situation.running)))
        return self.answer


@pytest.mark.slow
@relaxed
@given(session_lists(), clusters, policies, options)
def test_no_worker_is_idle_while_it_could_work(
    sessions: list[Session], cluster: Cluster, chosen: Policies, how: SimulationOptions
) -> None:
    """Looked at whenever the clock moves on: whatever could start at a moment has started in it."""
    with _looked_at() as looks:
        run(sessions, cluster, chosen, how)
    assert looks[0]


@contextmanager
def _looked_at() -> Iterator[list[int]]:
    """Engines and queues of the simulations in the block are checked before the clock moves; counts the looks."""
    engines: list[SimulatedEngine] = []
    queues: list[PrefillQueue] = []
    looks = [0]

    class WatchedEngine(SimulatedEngine):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            engines.append(self)

    class WatchedQueue(PrefillQueue):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            queues.append(self)

    class WatchedLoop(EventLoop):
        def run(self, until_s: float = inf) -> None:
            while self._heap and self._heap[0][0] <= until_s:
                when_s, _, action, argument = heappop(self._heap)
                if when_s > self.now_s:
                    looks[0] += 1
                    for engine in engines:
                        _check_engine(engine)
                    for queue in queues:
                        _check_queue(queue)
                self.now_s = when_s
                action(argument)
            assert not any(engine._waiting or engine._busy for engine in engines)
            assert not any(map(len, queues))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.simulator.worker.SimulatedEngine", WatchedEngine)
        patch.setattr("planner.simulator.worker.PrefillQueue", WatchedQueue)
        patch.setattr("planner.simulator.simulate.EventLoop", WatchedLoop)
        yield looks


def _check_engine(engine: SimulatedEngine) -> None:
    if not engine._busy:
        assert not engine._waiting
        assert not engine.batch
        assert not engine._prefilling
    if engine._waiting and engine.batch.run and _would_fit(engine._memory, engine._waiting[0]):
        assert engine.batch.run.cut(engine._loop.now_s) is None, "only the step in progress may still be ahead"


def _would_fit(memory: KvMemory, request: SimulatedRequest) -> bool:
    pinned = memory.used_tokens - sum(memory.held[name] for name in memory._idle)
    own = memory.held.get(request.session_id, 0)
    return not memory.capacity_tokens or pinned - own + request.total_tokens <= memory.capacity_tokens


def _check_queue(queue: PrefillQueue) -> None:
    free = CONCURRENCY - queue._slots_taken()
    assert free >= 0
    if free:
        assert not queue.staged or any(entry.stage is Stage.FETCHING for entry in queue.staged[0].members)
        assert not queue.waiting or len(queue.staged) >= free
