"""Rounds against scripted workers in this process: conflicts, failures and what is left behind."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ampd.handler_stream import HandlerStream
from ampd.keys import pack_tokens
from ampd.types import Parallelism, Role
from router.round_errors import WorkerLostError
from tests.router.replica_lab import HANGS, PROMPT, FakeContext, Replica, cluster, queues, worker
from tests.waiting import until

EXPECTED = [64, 65, 66, 67, 68]


@pytest.mark.parametrize("routing", ["always-remote", "always-local"])
async def test_a_round_gives_the_same_tokens_on_both_routes(routing: str) -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, routing) as replica:
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert record["route"] == routing.removeprefix("always-")
        assert replica.store.round_trips.calls["route"] == 1
    assert await queues(state) == {}


@pytest.mark.parametrize(
    ("targets", "missed"), [({}, False), ({"ttft_target": 1e-6}, True), ({"itl_target": 1e-6}, True)]
)
async def test_a_session_that_missed_a_target_is_known_for_it(targets: dict[str, float], missed: bool) -> None:
    state = await cluster(worker("d1"))
    async with Replica(state, target_floor=1e-12) as replica:
        await replica.round("s", router=targets)
        await replica.round("s")
        await replica.round("s")
        await replica.round("other")
        tasks = [request["task"] for _, _, request in replica.workers.calls if "task" in request]
        assert [task["session_missed"] for task in tasks] == [False, missed, missed, False]


async def test_a_round_that_ends_at_the_prefill_worker_is_taken_over() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        tokens, _ = await replica.round(stop_conditions={"max_tokens": 1})
        assert tokens == EXPECTED[:1]
        ((_, worker_id, request),) = [call for call in replica.workers.calls if call[0] == "generate"]
        assert (worker_id, request["source"]) == ("d1", ("p1", 1, ""))
        assert request["request"]["stop_conditions"]["max_tokens"] == 0
        assert request["prompt"] == pack_tokens([*PROMPT, 64])


async def test_workers_learn_the_parallelism_of_the_worker_that_has_the_kv() -> None:
    state = await cluster(
        worker("d1", parallelism=Parallelism(2)), worker("p1", Role.PREFILL, parallelism=Parallelism(4, host="h"))
    )
    async with Replica(state) as replica:
        await replica.round("s")
        asked = [(call, request["source"]) for call, _, request in replica.workers.calls if "task" in request]
        assert asked == [("prefill", None), ("generate", ("p1", 4, "h"))], (
            "the first round of a session has no history to read"
        )


async def test_a_client_that_leaves_before_the_worker_was_reached_leaves_no_entry() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        context = FakeContext()

        async def never(*_: Any) -> Any:
            context.stop_generating()
            raise WorkerLostError("p1", "unreachable")

        called, replica.workers.prefill = replica.workers.prefill, never
        chunks = [chunk async for chunk in replica.chunks(context=context)]
        assert chunks == []
        await asyncio.gather(*replica.tasks)
        assert await queues(state) == {}
        replica.workers.prefill = called
        again = (await replica.round())[1]["kept_tokens"]
        assert (again, (await replica.round())[1]["kept_tokens"]) == (0, len(PROMPT)), "no KV of the prompt had existed"


@pytest.mark.parametrize("session", ["s", None])
async def test_a_client_that_leaves_while_its_round_is_placed_leaves_no_entry(session: str | None) -> None:
    """The shared state has the placement already, and its answer is on the way."""
    state = await cluster(worker("d1"))
    async with Replica(state) as replica:
        write, written = replica.store.route, asyncio.Event()

        async def slow(*args: Any) -> Any:
            outcome = await write(*args)
            written.set()
            await asyncio.sleep(0.01)
            return outcome

        replica.store.route = slow
        frontend = replica.frontend(session)
        stream = HandlerStream(frontend.serve)

        async def read() -> None:
            async for _ in stream:
                pass

        reading = asyncio.create_task(read())
        await written.wait()
        reading.cancel()
        await asyncio.wait({reading})
        await stream.aclose()
        while replica.tasks:
            await replica.tasks.pop()
        assert not replica.workers.asked("generate")
        bound = await replica.store.binding(frontend.session_id)
        assert (bound is not None) == (session is not None)
    assert await queues(state) == {}


@pytest.mark.parametrize("routing", ["always-remote", "always-local"])
async def test_a_call_that_no_worker_begins_leaves_no_entry(routing: str) -> None:
    """A worker does not begin a call whose client has gone on the way."""
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, routing) as replica:
        context = FakeContext()

        async def nothing() -> AsyncIterator[Any]:
            context.stop_generating()
            for chunk in tuple[Any, ...]():
                yield chunk

        async def ignored(*_: Any) -> AsyncIterator[Any]:
            return nothing()

        replica.workers.prefill = replica.workers.generate = ignored
        assert [chunk async for chunk in replica.chunks("s", context)] == []
        while replica.tasks:
            await replica.tasks.pop()
    assert await queues(state) == {}


@pytest.mark.parametrize(("endpoint", "name"), [("prefill", "p1"), ("generate", "d1")])
async def test_a_round_that_nobody_reads_on_stops_its_call(endpoint: str, name: str) -> None:
    """Dynamo can drop a round without stopping it. A worker that says nothing does not notice a dropped stream."""
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        replica.workers.fail[endpoint, name] = HANGS
        stream = replica.chunks()

        async def read() -> None:
            async for _ in stream:
                pass

        reading = asyncio.create_task(read())
        await until(lambda: name in replica.workers.asked(endpoint))
        reading.cancel()
        await asyncio.wait({reading})
        await stream.aclose()
        await until(lambda: replica.workers.contexts[-1].is_stopped())
