import asyncio
import logging

import pytest

from ampd.background_tasks import SupervisedTask


async def test_an_error_is_logged_and_the_work_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    works = asyncio.Event()

    async def work() -> None:
        calls.append(len(calls))
        if len(calls) < 3:
            raise ValueError("nonsense")
        works.set()
        await asyncio.Event().wait()

    task = SupervisedTask("worker-of-the-test", work, pause_s=0.01)
    assert not task.is_running
    task.start()
    await works.wait()
    assert task.is_running
    await task.stop()
    assert not task.is_running
    assert calls == [0, 1, 2]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == ["worker-of-the-test failed; trying again"] * 2
    assert all(record.exc_info for record in errors)


async def test_stopping_without_a_start_does_nothing() -> None:
    async def work() -> None:
        raise AssertionError("never called")

    await SupervisedTask("idle", work).stop()
