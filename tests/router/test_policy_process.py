"""A pools policy in a process of its own."""

import asyncio
import logging
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ampd.errors import UserError
from ampd.perf.piecewise import load_performance_model
from ampd.policies.base import PoolsSituation, RoleChange
from ampd.policies.registry import Policy
from ampd.types import Role, Slo, WorkerView
from router.policy_process import PolicyProcess
from tests.router.slow_policies import Dies, LacksTimes, TellsItsProcess
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
    asked.append(PolicyProcess(policy))  # type: ignore[arg-type]
    return asked[-1]


async def answered(process: PolicyProcess, now_s: float = 1e9) -> Sequence[RoleChange]:
    """The answer to one question. The default time is far behind the rest after the last one."""
    assert process.is_due(now_s)
    process.ask(SITUATION)
    assert not process.is_due(now_s)
    task = process._asked
    assert task is not None
    assert process.answer(now_s) == ()
    await asyncio.wait([task])
    return process.answer(SITUATION.now_s)


async def test_the_answer_comes_from_one_other_process_that_is_nice(asked: list[PolicyProcess]) -> None:
    process = process_of(TellsItsProcess(), asked)
    (first,), (second,) = await answered(process), await answered(process)
    assert first.reason == second.reason != str(os.getpid())
    assert first.lane == "19"
    process.stop()
    await until(lambda: not Path(f"/proc/{first.reason}/exe").exists())


async def test_a_process_that_dies_changes_nothing_and_is_started_again(
    asked: list[PolicyProcess], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "router.policy_process")
    process = process_of(Dies(), asked)
    assert await answered(process) == ()
    assert await answered(process) == ()
    assert "died" in caplog.text


async def test_an_error_of_the_user_arrives_as_one(asked: list[PolicyProcess]) -> None:
    with pytest.raises(UserError, match="no times for TP 3"):
        await answered(process_of(LacksTimes(), asked))


async def test_after_an_answer_the_process_rests(asked: list[PolicyProcess]) -> None:
    process = process_of(TellsItsProcess(), asked)
    process.ask(SITUATION)
    task = process._asked
    assert task is not None
    await asyncio.wait([task])
    assert process.answer(SITUATION.now_s + 2.0)
    assert not process.is_due(SITUATION.now_s + 19.9)
    assert process.is_due(SITUATION.now_s + 20.1)
