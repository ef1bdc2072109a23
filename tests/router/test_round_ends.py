"""Workers tell a coordinator of its rounds, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ampd.call_signatures import RPC_HOST, Signer
from ampd.round_end import RUNNING_S, Begun, RoundEnded, Told
from router import round_ends
from router.round_errors import WorkerLostError
from tests.waiting import until
from workers import round_ends as worker_ends

KEYS = (b"k" * 32,)


class Run:
    """A round that a worker has."""

    def __init__(self, request_id: str, worker_id: str = "w", given_s: float = 0.0) -> None:
        self.request_id, self.worker_id, self.given_s = request_id, worker_id, given_s
        self.was_answered = self.is_over = False
        self.heard: list[Told | WorkerLostError] = []

    def told(self, told: Any) -> None:
        self.heard.append(told)
        self.is_over = isinstance(told, RoundEnded)

    def lost(self, error: WorkerLostError) -> None:
        self.heard.append(error)
        self.is_over = True

    def give_up(self) -> None:
        self.is_over = True


class Coordinator:
    """One end. `lives`: whether workers answer a question."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lives = False
        self.ends: Any = round_ends.RoundEnds(self._lost, lambda: self.now_s)

    async def _lost(self, worker_id: str, message: str) -> WorkerLostError:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return WorkerLostError(worker_id, message, lives=self.lives)

    def begin(self, request_id: str, worker_id: str = "w") -> Run:
        run = Run(request_id, worker_id, self.now_s)
        self.ends.begins(run)
        return run


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RPC_HOST, "127.0.0.1")


@asynccontextmanager
async def both(secrets: tuple[bytes, ...] = KEYS) -> AsyncIterator[tuple[Coordinator, worker_ends.RoundEnds]]:
    coordinator = Coordinator()
    await coordinator.ends.listen(KEYS)
    worker = worker_ends.RoundEnds("w", Signer(secrets, "worker-w"))
    worker.start()
    yield coordinator, worker
    await worker.stop()
    await coordinator.ends.stop()


pytestmark = pytest.mark.usefixtures("loopback")


async def test_what_a_worker_tells_reaches_the_round_in_its_order() -> None:
    async with both() as (coordinator, worker):
        run, address = coordinator.begin("r"), coordinator.ends.address
        other = coordinator.begin("other", "another worker")
        worker.begins(address, "r")
        await until(lambda: run.heard)
        told: list[Any] = [Begun("r", has_output=True), Begun("other"), RoundEnded("r", "complete", bytes(4))]
        for each in told:
            worker.tell(address, each)
        await until(lambda: run.is_over)
        assert run.heard == [Begun("r"), told[0], told[2]]
        assert other.heard == [], "a worker speaks of its own rounds only"


async def test_a_short_round_is_told_once() -> None:
    async with both() as (coordinator, worker):
        run, long, address = coordinator.begin("r"), coordinator.begin("long"), coordinator.ends.address
        worker.begins(address, "r")
        worker.begins(address, "long")
        worker.tell(address, RoundEnded("r", "complete"))
        await until(lambda: long.heard)
        assert run.heard == [RoundEnded("r", "complete")]


async def test_the_rounds_of_a_worker_that_dies_are_lost_and_a_frontend_may_send_them_again() -> None:
    async with both() as (coordinator, worker):
        run, address = coordinator.begin("r"), coordinator.ends.address
        worker.begins(address, "r")
        await until(lambda: run.heard)
        await worker.stop()
        await until(lambda: run.is_over)
        assert isinstance(run.heard[-1], WorkerLostError)
        coordinator.ends.over(run, may_come_again=True)
        assert await coordinator.ends.before("r") is run
        assert await coordinator.ends.before("r") is None


async def test_a_worker_that_answers_keeps_its_rounds_when_its_connection_breaks() -> None:
    async with both() as (coordinator, worker):
        coordinator.lives = True
        run, address = coordinator.begin("r"), coordinator.ends.address
        worker.begins(address, "r")
        await until(lambda: run.heard)
        for connection in coordinator.ends._connections.values():
            connection.close()
        await until(lambda: not coordinator.ends._connections)
        worker.tell(address, RoundEnded("r", "complete"))
        await until(lambda: run.is_over)
        assert run.heard == [Begun("r"), RoundEnded("r", "complete")]


async def test_a_round_that_another_worker_has_got_meanwhile_is_not_lost() -> None:
    """The call that gave it to the first one failed, before the coordinator knew that this worker has died."""
    coordinator = Coordinator()
    moved, waiting, lost = (coordinator.begin(name) for name in ("moved", "waiting", "lost"))
    verdict = asyncio.create_task(coordinator.ends._unless_alive("w", [moved, waiting, lost]))
    await asyncio.sleep(0)
    coordinator.ends.over(moved)
    moved.worker_id = "other"
    coordinator.ends.begins(moved)
    coordinator.ends.over(waiting)
    await verdict
    assert [run.is_over for run in (moved, waiting, lost)] == [False, False, True]


async def test_a_round_that_is_sent_again_while_its_worker_has_it_leaves_that_worker() -> None:
    coordinator = Coordinator()
    for lives in (True, False):
        coordinator.lives = lives
        run = coordinator.begin("r")
        await coordinator.ends.before("r")
        (error,) = run.heard
        assert isinstance(error, WorkerLostError)
        assert error.lives is lives
        coordinator.ends.over(run)


async def test_a_round_that_its_worker_does_not_have_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client had left before the worker could answer, or the message got lost."""
    monkeypatch.setattr(worker_ends, "RUNNING_S", 0.01)
    async with both() as (coordinator, worker):
        gone, address = coordinator.begin("gone"), coordinator.ends.address
        worker.begins(address, "has")
        coordinator.now_s = 2 * RUNNING_S
        has, new = coordinator.begin("has"), coordinator.begin("new")
        has.given_s = 0.0
        await until(lambda: gone.is_over)
        assert gone.heard[0] == RoundEnded("gone", "left")
        assert (has.is_over, new.is_over) == (False, False)


async def test_a_stranger_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    async with both(secrets=(b"x" * 32,)) as (coordinator, worker):
        run, address = coordinator.begin("r"), coordinator.ends.address
        worker.begins(address, "r")
        worker.tell(address, RoundEnded("r", "complete"))
        await until(lambda: "a message of a stranger is not taken: its signature is wrong" in caplog.text)
        assert run.heard == []


async def test_a_coordinator_that_has_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_ends, "_PAUSE_S", 0.0)
    worker = worker_ends.RoundEnds("w", Signer((), "w"))
    worker.begins("127.0.0.1:1", "r")
    worker.tell("127.0.0.1:1", RoundEnded("r", "complete"))
    await until(lambda: worker._links["127.0.0.1:1"].is_given_up)
    worker.tell("127.0.0.1:1", Begun("r"))
    await asyncio.sleep(0)
    await worker.stop()


async def test_of_two_tries_that_are_served_at_once_one_ends() -> None:
    """A coordinator that stood still has both."""
    coordinator = Coordinator()
    first = coordinator.begin("r")
    coordinator.ends.begins(first)
    assert not first.is_over, "it is given to another worker"
    second = coordinator.begin("r", "another worker")
    assert (first.is_over, second.is_over) == (True, False)
