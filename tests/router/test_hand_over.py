"""Rounds that a coordinator hands on to a worker, which answers the frontend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from ampd.perf.presets import load_performance_model
from ampd.policies import registry
from ampd.round_end import Begun, RoundEnded
from router.coordinator import Coordinator
from router.policies import CoordinatorPolicies
from router.round_errors import WorkerLostError
from router.settings import CoordinatorSettings
from tests.memory_store import MemoryStore
from tests.router.replica_lab import PROMPT, Answering, FakeContext, Workers, cluster, worker
from tests.waiting import until

NEW = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 5}, "agent_context": {"session_id": "s"}}


class Frame(FakeContext):
    """A frontend's request."""

    def __init__(self, request: Any = NEW, request_id: str = "r") -> None:
        super().__init__()
        self._request, self._id = request, request_id

    def id(self) -> str:
        return self._id

    def request(self) -> Any:
        return self._request


def framed(request: Any = NEW) -> Any:
    return Frame(request)


class HandingOn(Answering):
    """Workers that take what is handed on. `act`: what happens to it."""

    def __init__(self, workers: Workers, ends: Callable[[], Any]) -> None:
        super().__init__(workers, ends)
        self.given: list[tuple[str, Any]] = []
        self.act: Callable[[str, str], None] = lambda _worker, _request: None

    async def hand_on(self, frame: Any, worker_id: str, request: Any) -> None:
        self.given.append((worker_id, request))
        self.act(worker_id, frame.id())


@asynccontextmanager
async def opened(*names: str) -> AsyncIterator[tuple[Coordinator, HandingOn]]:
    store = MemoryStore(await cluster(*(worker(name) for name in names)))
    calls = HandingOn(Workers(store), lambda: coordinator._ends)
    policies = CoordinatorPolicies(
        registry.create("binding", "least-kv"),
        registry.create("routing", "always-local"),
        load_performance_model("tiny-cpu"),
        None,
    )
    coordinator = Coordinator(CoordinatorSettings(model=Path("m"), perf="tiny-cpu"), cast(Any, calls), store, policies)
    await coordinator.start()
    yield coordinator, calls
    await coordinator.stop()


def taken_by_worker() -> None:
    """Nobody waits for it."""


def taken(coordinator: Coordinator, worker_id: str, request_id: str) -> None:
    coordinator._ends._told(worker_id, Begun(request_id))


async def test_a_round_is_over_with_its_end_and_its_frontend_may_rely_on_the_worker_that_has_taken_it() -> None:
    async with opened("d1") as (coordinator, calls):
        taken_after: list[int] = []
        taking = asyncio.ensure_future(coordinator.take(framed(), lambda: taken_after.append(len(calls.given))))
        await until(lambda: taken_after)
        assert taken_after == [1]
        assert not taking.done()
        taken(coordinator, "d1", "r")
        assert await taking
        start = calls.given[0][1]["start"]
        assert (start["request_id"], start["tell"], start["record"]) == ("r", coordinator._ends.address, None)
        assert coordinator.running == 1
        coordinator._ends._told("d1", RoundEnded("r", "complete", bytes(20), True, 0.5, 0.01))
        assert coordinator.running == 0


async def test_a_worker_that_does_not_take_a_round_is_passed_by() -> None:
    async with opened("d1", "d2") as (coordinator, calls):

        def act(worker_id: str, request_id: str) -> None:
            if len(calls.given) == 1:
                raise WorkerLostError(worker_id, "gone")
            taken(coordinator, worker_id, request_id)

        calls.act = act
        assert await coordinator.take(framed(), taken_by_worker)
        assert {name for name, _ in calls.given} == {"d1", "d2"}


async def test_a_round_whose_worker_dies_before_it_has_the_frontend_goes_to_another_one() -> None:
    """The frontend would wait for ever, because no stream of its own breaks off."""
    async with opened("d1", "d2") as (coordinator, calls):

        def act(worker_id: str, request_id: str) -> None:
            if len(calls.given) == 1:
                (run,) = coordinator._ends._of(worker_id)
                asyncio.get_running_loop().call_soon(run.lost, WorkerLostError(worker_id, "gone", has_died=True))
            else:
                taken(coordinator, worker_id, request_id)

        calls.act = act
        assert await coordinator.take(framed(), taken_by_worker)
        assert {name for name, _ in calls.given} == {"d1", "d2"}
        assert coordinator.worker_deaths == 1
        assert coordinator.running == 1


async def test_a_refusal_is_sent_by_dynamo_s_handler_once() -> None:
    async with opened("d1") as (coordinator, calls):
        frame = framed({**NEW, "token_ids": []})
        assert not await coordinator.take(frame, taken_by_worker)
        (chunk,) = [chunk async for chunk in coordinator.generate({}, frame)]
        assert chunk["error"]["class"] == "InvalidRequest"
        assert "the prompt is empty" in chunk["error"]["message"]
        assert (coordinator.failures, calls.given, coordinator._refusals) == ({400: 1}, [], {})
