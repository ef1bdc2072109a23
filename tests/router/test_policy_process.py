"""A pools policy in a process of its own."""

import asyncio
import logging
import os
import random
import signal
from collections.abc import Iterator, Sequence

import pytest

from ampd.errors import UserError
from ampd.perf.presets import load_performance_model
from ampd.policies.base import PoolsSituation, RoleChange
from ampd.policies.registry import Policy
from ampd.types import Role, Slo, WorkerView
from router.policy_process import PolicyProcess
from tests.harness.process_ends import alive
from tests.router.slow_policies import Dies, Hangs, LacksTimes, TellsItsProcess
from tests.waiting import until

pytestmark = pytest.mark.slow

SITUATION = PoolsSituation(
    model=load_performance_model("tiny-cpu"),
    now_s=1.0,
    workers=[WorkerView("d", Role.DECODE)],
    slo=Slo(1.0, 0.1),
    changed_s=float("-inf"),
    rng=random.Random(1),
)


@pytest.fixture
def asked() -> Iterator[list[PolicyProcess]]:
    processes: list[PolicyProcess] = []
    yield processes
    for process in processes:
        process.stop()


def process_of(policy: Policy, asked: list[PolicyProcess]) -> PolicyProcess:
    process = PolicyProcess(policy, Clock())  # type: ignore[arg-type]
    asked.append(process)
    return process


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def answered(process: PolicyProcess) -> Sequence[RoleChange]:
    """The answer to one question."""
    assert process.is_due()
    process.ask(SITUATION)
    assert not process.is_due()
    task = process._asked
    assert task is not None
    assert process.answer() == ()
    await asyncio.wait([task])
    return process.answer()


async def test_the_answer_comes_from_one_other_process_that_is_nice(asked: list[PolicyProcess]) -> None:
    process = process_of(TellsItsProcess(), asked)
    (first,), (second,) = await answered(process), await answered(process)
    assert first.reason == second.reason != str(os.getpid())
    assert first.label == str(min(os.nice(0) + 19, 19))
    process.stop()
    await until(lambda: not alive(int(first.reason)))


async def test_a_process_that_dies_changes_nothing_and_is_started_again(
    asked: list[PolicyProcess], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "router.policy_process")
    process = process_of(Dies(), asked)
    assert await answered(process) == ()
    assert await answered(process) == ()
    assert "died" in caplog.text


async def test_a_process_that_hangs_is_ended_and_the_next_question_starts_another(
    asked: list[PolicyProcess], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.policy_process._LONGEST_S", 0.5)
    process = process_of(Hangs(), asked)
    assert await answered(process) == ()
    assert "was ended after 0.5 s" in caplog.text
    assert process._pool is None
    assert await answered(process) == ()


async def test_an_error_of_the_user_arrives_as_one(asked: list[PolicyProcess]) -> None:
    with pytest.raises(UserError, match="no times for TP 3"):
        await answered(process_of(LacksTimes(), asked))


async def test_after_an_answer_the_process_rests(asked: list[PolicyProcess]) -> None:
    clock = Clock()
    asked.append(process := PolicyProcess(TellsItsProcess(), clock))
    process.ask(SITUATION)
    task = process._asked
    assert task is not None
    clock.now_s = 2.0
    await asyncio.wait([task])
    clock.now_s = 100.0  # an answer that is read late counts as of its time
    assert process.answer()
    assert process.lasted_s == 2.0
    assert process.is_due()
    clock.now_s = 19.9
    assert not process.is_due()


async def test_a_forgotten_question_has_no_answer(asked: list[PolicyProcess]) -> None:
    process = process_of(TellsItsProcess(), asked)
    process.ask(SITUATION)
    process.forget()
    await asyncio.sleep(0)
    assert process.answer() == ()
    assert len(await answered(process)) == 1


async def test_signals_to_all_processes_are_the_parents(asked: list[PolicyProcess]) -> None:
    process = process_of(TellsItsProcess(), asked)
    (first,) = await answered(process)
    os.kill(int(first.reason), signal.SIGTERM)
    os.kill(int(first.reason), signal.SIGINT)
    (second,) = await answered(process)
    assert second.reason == first.reason
