"""A worker's view of itself: a long queue is published as its first prefills and the sums of the others."""

import asyncio

from ampd.perf.presets import load_performance_model
from ampd.policies.estimates import ORDERED_PREFILLS
from ampd.policies.registry import create
from ampd.types import Parallelism, PrefillTask, QueueRest, Role, Slo, WorkerView
from workers.prefill_queue import AsyncPrefillQueue
from workers.worker_view import listed


def task(number: int) -> PrefillTask:
    return PrefillTask(f"t{number}", "s", 16, number, 0.0, Slo(1.0, 0.1))


async def test_a_long_queue_is_listed_in_part() -> None:
    queue = AsyncPrefillQueue(create("ordering", "fcfs"), load_performance_model("tiny-cpu"), Parallelism(1))
    places = [queue.place(task(number), fetches=False) for number in range(ORDERED_PREFILLS + 2)]
    for count, place in enumerate(places, start=1):
        place.__enter__()
        await asyncio.sleep(0)
        first, rest = listed(queue.tasks())
        view = WorkerView("w", Role.PREFILL, queue=first, queue_rest=rest)
        assert view.queued_prefills == count
        assert len(view.queue) == min(count, ORDERED_PREFILLS)
    assert view.queue_rest == QueueRest(2, 32, 2 * ORDERED_PREFILLS + 1)
    for place in places:
        place.__exit__(None, None, None)
    assert listed(queue.tasks()) == ((), QueueRest())
