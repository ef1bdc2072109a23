"""Workers whose lease is over are asked: those that answer stay, those that do not are dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ampd.state.view import ClusterView
from ampd.types import Role, WorkerView
from router.round_errors import WorkerLostError, WorkerRefusedError
from router.worker_access import LeaseProbe
from tests.memory_store import MemoryState, MemoryStore
from tests.virtual_time import run_virtually

LEASE_S = 10.0


class Answers:
    """The workers' KV endpoints; a worker without an answer is lost."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.asked: list[str] = []

    def answer(self, worker_id: str, answer: Any) -> None:
        self._answers[worker_id] = answer

    async def kv(self, worker_id: str, request: Any, timeout_s: float) -> Any:
        assert request == {"op": "match", "keys": []}
        self.asked.append(worker_id)
        answer = self._answers.get(worker_id)
        if answer is None:
            await asyncio.sleep(timeout_s)
            raise WorkerLostError(worker_id, "no answer")
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_only_those_that_do_not_answer_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        store = MemoryStore(MemoryState(clock))
        for name in ("alive", "busy", "dead"):
            await store.publish_worker(WorkerView(name, Role.DECODE), LEASE_S)
        answers = Answers(alive={"matched": 0}, busy=WorkerRefusedError("busy", 503, "full"))
        async with ClusterView(store, lease_s=LEASE_S, clock=clock) as view:
            probe = LeaseProbe(view, answers, timeout_s=1.0)  # type: ignore[arg-type]
            probe.start()
            await asyncio.sleep(0.9 * LEASE_S)
            assert answers.asked == [], "a worker is not asked before its lease is over"
            for _ in range(3):
                await asyncio.sleep(LEASE_S)
                assert {worker.worker_id for worker in view.decode()} == {"alive", "busy"}
            await probe.stop()
        assert answers.asked.count("dead") == 1
        # An answer counts as a renewal, so each lease brings one question.
        assert answers.asked.count("alive") == answers.asked.count("busy") == 3

    run_virtually(scenario(), monkeypatch)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "router.worker_access"]
    assert line == "worker dead: its lease is over, and worker dead: no answer"


def test_a_worker_that_hangs_while_the_state_is_lost_is_dropped_until_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        state = MemoryState(clock)
        for name in ("alive", "hung"):
            await MemoryStore(state).publish_worker(WorkerView(name, Role.DECODE), LEASE_S)
        answers = Answers(alive={"matched": 0})
        async with ClusterView(MemoryStore(state), lease_s=LEASE_S, clock=clock) as view:
            probe = LeaseProbe(view, answers, timeout_s=1.0)  # type: ignore[arg-type]
            probe.start()
            state.lose()
            await asyncio.sleep(0.9 * LEASE_S)
            assert answers.asked == []
            await asyncio.sleep(LEASE_S)
            assert not view.connected
            assert [worker.worker_id for worker in view.decode()] == ["alive"]
            assert not view.knows("hung"), "the calls there are given up"
            answers.answer("hung", {"matched": 0})
            await asyncio.sleep(3.0)
            assert {worker.worker_id for worker in view.decode()} == {"alive", "hung"}
            await probe.stop()

    run_virtually(scenario(), monkeypatch)
    lines = [record.getMessage() for record in caplog.records if record.name == "router.worker_access"]
    assert lines == ["worker hung: its lease is over, and worker hung: no answer"]


def test_a_worker_that_has_left_lives_until_it_answers_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        store = MemoryStore(MemoryState(clock))
        for name in ("stays", "leaves"):
            await store.publish_worker(WorkerView(name, Role.DECODE), 100 * LEASE_S)
        answers = Answers(stays={"matched": 0}, leaves={"matched": 0})
        async with ClusterView(store, lease_s=LEASE_S, clock=clock) as view:
            probe = LeaseProbe(view, answers, timeout_s=1.0)  # type: ignore[arg-type]
            probe.start()
            await store.remove_worker("leaves")
            await asyncio.sleep(10 * LEASE_S)
            assert [worker.worker_id for worker in view.workers()] == ["stays"]
            assert view.lives("leaves")
            assert not view.knows("leaves")
            answers.answer("leaves", None)
            await asyncio.sleep(2 * LEASE_S)
            assert not view.lives("leaves")
            answers.asked.clear()
            await asyncio.sleep(2 * LEASE_S)
            assert "leaves" not in answers.asked
            await probe.stop()

    run_virtually(scenario(), monkeypatch)
