"""Nobody waits for what is free: engines admit as soon as memory allows, queues start as soon as a slot is free."""

from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from ampd.serving.prefill_queue import PrefillQueue, Stage
from planner.simulator.cluster import Cluster
from planner.simulator.engine import LONGEST_RUN_STEPS, SimulatedEngine
from planner.simulator.events import EventLoop
from planner.simulator.kv_memory import KvMemory
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.sequence import EngineSequence
from workloads.trace import Session

from .lab import RouteBy, clusters, options, policies, run, session, session_lists, single, steps_at_once

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
        def run(self) -> None:
            while self._heap:
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


def _would_fit(memory: KvMemory, sequence: EngineSequence) -> bool:
    pinned = memory.used_tokens - sum(memory.held[name] for name in memory._idle)
    own = memory.held.get(sequence.session_id, 0)
    return not memory.capacity_tokens or pinned - own + sequence.total_tokens <= memory.capacity_tokens


def _check_queue(queue: PrefillQueue) -> None:
    free = queue.concurrency - len(queue.computing)
    assert free >= 0
    if free:
        assert not queue.staged or any(entry.stage is Stage.FETCHING for entry in queue.staged[0].members)
        assert not queue.waiting or len(queue.staged) >= free
