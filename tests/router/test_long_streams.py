"""Streams that are older than any patience when their worker is lost: that costs time, not the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from ampd.handler_stream import HandlerStream
from ampd.serving.admission import patience_s
from ampd.tiny_model import tiny_model_path
from ampd.types import PrefillTask, Role
from ampd.wire import OVERLOADED
from router.round_errors import RoundRefusedError, WorkerLostError, WorkerRefusedError
from tests.memory_store import MemoryState
from tests.router.replica_lab import SLO, Replica, cluster, queues, worker
from tests.router.site_lab import Site
from tests.waiting import until
from tests.workers.engines.modelled_lab import Lab, Times, prompt_of
from tests.workers.parts_lab import worker_parts
from tests.workers.rounds_lab import chunks_of, message

EXPECTED = [64, 65, 66, 67, 68]
BUSY = "this worker has too much to do"


class ShiftedClock:
    """The loop's clock, which a test puts forward."""

    def __init__(self) -> None:
        self.shift_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.shift_s


def with_clock(replica: Replica) -> ShiftedClock:
    clock = ShiftedClock()
    replica.services = replace(replica.services, clock=clock)
    return clock


async def tokens_of(chunks: HandlerStream[dict[str, Any]], clock: ShiftedClock) -> list[int]:
    """The tokens of a round, whose first one came a minute before all others."""
    found: list[int] = []
    async for chunk in chunks:
        clock.shift_s = 60.0
        found += chunk["token_ids"]
    return found


def before_call(replica: Replica, worker_id: str, action: Callable[[], Awaitable[None]]) -> None:
    """Do something when a worker is called."""
    start = replica.workers._start

    async def act(endpoint: str, called: str, *rest: Any) -> Any:
        if called == worker_id:
            await action()
        return await start(endpoint, called, *rest)

    replica.workers._start = act


def sent(replica: Replica, endpoint: str, worker_id: str) -> dict[str, Any]:
    (request,) = [request for *call, request in replica.workers.calls if call == [endpoint, worker_id]]
    task: dict[str, Any] = request["task"]
    return task


async def test_a_stream_that_a_lost_worker_held_up_waits_afresh() -> None:
    async with Replica(await cluster(worker("d1"), worker("d2", kv_used_tokens=1)), "always-local") as replica:
        clock = with_clock(replica)
        replica.workers.fail["generate", "d1"] = 2
        assert await tokens_of(replica.chunks(), clock) == EXPECTED
        first, again = sent(replica, "generate", "d1"), sent(replica, "generate", "d2")
        assert (first["has_output"], again["has_output"]) == (False, True)
        assert -again["arrival_s"] < SLO.ttft_s


async def test_a_round_without_output_keeps_its_arrival() -> None:
    async with Replica(await cluster(worker("d1"), worker("d2", kv_used_tokens=1)), "always-local") as replica:
        clock = with_clock(replica)
        replica.workers.fail["generate", "d1"] = 0

        async def wait_long() -> None:
            clock.shift_s = 60.0

        before_call(replica, "d1", wait_long)
        assert (await replica.round())[0] == EXPECTED
        again = sent(replica, "generate", "d2")
        assert not again["has_output"]
        assert again["arrival_s"] <= -60.0


async def test_a_stream_that_an_overloaded_worker_refuses_goes_on_at_another_one() -> None:
    state = await cluster(*(worker(f"d{number}", kv_used_tokens=number) for number in (1, 2, 3)))
    async with Replica(state, "always-local") as replica:
        clock = with_clock(replica)
        replica.workers.fail |= {
            ("generate", "d1"): 2,
            ("generate", "d2"): WorkerRefusedError("d2", OVERLOADED, BUSY),
        }
        assert await tokens_of(replica.chunks(), clock) == EXPECTED
        assert replica.workers.asked("generate") == ["d1", "d2", "d3"]
        assert replica.view.worker("d2") is not None, "other rounds still go to it"
        await asyncio.gather(*replica.tasks)
    assert await queues(state) == {}


async def test_a_stream_that_an_overloaded_prefill_worker_refuses_is_prefilled_locally() -> None:
    async with Replica(await cluster(worker("d1"), worker("d2", kv_used_tokens=1))) as replica:
        clock = with_clock(replica)
        replica.workers.fail |= {
            ("generate", "d1"): 2,
            ("prefill", "p1"): WorkerRefusedError("p1", OVERLOADED, BUSY),
        }

        async def start_a_prefill_worker() -> None:
            await replica.store.publish_worker(worker("p1", Role.PREFILL), 60.0)
            await until(lambda: replica.view.worker("p1") is not None)

        before_call(replica, "d1", start_a_prefill_worker)
        assert await tokens_of(replica.chunks(), clock) == EXPECTED
        assert replica.workers.asked("prefill") == ["p1"]
        assert replica.workers.asked("generate") == ["d1", "d2"]
        assert replica.view.worker("p1") is not None, "other rounds still go to it"


async def test_a_new_round_that_an_overloaded_worker_refuses_goes_nowhere_else() -> None:
    async with Replica(await cluster(worker("d1"), worker("d2", kv_used_tokens=1)), "always-local") as replica:
        replica.workers.fail["generate", "d1"] = WorkerRefusedError("d1", OVERLOADED, BUSY)
        with pytest.raises(RoundRefusedError, match=BUSY) as refused:
            await replica.round()
        assert refused.value.status == OVERLOADED
        assert replica.workers.asked("generate") == ["d1"]


async def test_a_stream_that_all_workers_refuse_says_so() -> None:
    async with Replica(await cluster(worker("d1"), worker("d2", kv_used_tokens=1)), "always-local") as replica:
        clock = with_clock(replica)
        replica.workers.fail |= {
            ("generate", "d1"): 2,
            ("generate", "d2"): WorkerRefusedError("d2", OVERLOADED, BUSY),
        }
        with pytest.raises(RoundRefusedError, match="every decode worker has failed or refused") as refused:
            await tokens_of(replica.chunks(), clock)
        assert refused.value.status == 503


async def test_a_stream_older_than_the_patience_ends_at_a_worker_whose_queue_is_busy() -> None:
    """Two modelled workers, and a coordinator: all tokens come, although the round must wait for others."""
    lab = Lab(tiny_model_path(), Times(per_token_s=0.001))
    prompt = prompt_of(64, seed=1)
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(Replica(MemoryState(), "always-local"))
        clock = with_clock(replica)
        parts = {
            name: worker_parts(name, await stack.enter_async_context(lab.engine(name)), lab.times, clock=clock)
            for name in ("d1", "d2")
        }
        site = Site(replica, parts)
        await site.publish()
        expected, _ = await site.round("undisturbed", prompt)
        assert len(expected) == 5
        queues_of = {name: parts[name].queue for name in parts}
        asked: list[str] = []
        blocking: list[asyncio.Task[list[Any]]] = []

        async def generate(worker_id: str, request: Any, _context: Any) -> AsyncIterator[dict[str, Any]]:
            asked.append(worker_id)
            chunks = chunks_of(parts[worker_id].rounds.generate, request)
            return _dies(chunks) if len(asked) == 1 else chunks

        async def _dies(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
            yield await anext(chunks)
            (other,) = set(parts) - set(asked)
            await chunks.aclose()  # type: ignore[attr-defined]
            before = [message(prompt_of(200, seed=number), 1, f"long-{number}") for number in range(2, 6)]
            blocking.extend(asyncio.create_task(_all(chunks_of(parts[other].rounds.generate, each))) for each in before)
            await until(lambda: len(queues_of[other]) == len(before))
            clock.shift_s = 60.0
            dead.update(asked)
            raise ConnectionError("gone")

        async def kv(worker_id: str, request: Any, timeout_s: float) -> Any:
            if worker_id in dead:
                raise WorkerLostError(worker_id, "gone")
            return await answer(worker_id, request, timeout_s)

        dead, answer = set[str](), replica.workers.kv
        replica.workers.generate, replica.workers.kv = generate, kv
        found = [token async for chunk in replica.chunks(token_ids=prompt) for token in chunk["token_ids"]]
        assert found == expected
        assert len(set(asked)) == len(asked) == 2
        assert patience_s(PrefillTask("t", "s", 0, 1, 0.0, SLO), SLO, 4.0) < 60.0, "the stream was old enough"
        assert all(await asyncio.gather(*blocking)), "the rounds before it have run too"


async def _all(chunks: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk async for chunk in chunks]
