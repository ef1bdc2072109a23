import asyncio
import logging

import pytest

from ampd.background_tasks import BackgroundTasks
from tests.virtual_time import run_virtually


def test_all_work_ends_in_time_or_is_cancelled_and_its_errors_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []

    async def work(name: str, duration_s: float) -> None:
        try:
            await asyncio.sleep(duration_s)
        except asyncio.CancelledError:
            ended.append(f"{name} cancelled")
            raise
        if name == "bad":
            raise ValueError("no more")
        ended.append(name)

    async def scenario() -> None:
        tasks = BackgroundTasks()
        await tasks.finish(1.0)
        for name, duration_s in (("short", 1.0), ("bad", 2.0), ("endless", 1e6)):
            tasks.spawn(work(name, duration_s))
        await tasks.finish(5.0)
        await asyncio.sleep(0)
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)

    run_virtually(scenario(), monkeypatch)
    assert ended == ["short", "endless cancelled"]
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "no more" in str(error.exc_info)


async def test_work_beyond_the_bound_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        done.append(number)

    tasks = BackgroundTasks(most=2)
    for number in range(5):
        tasks.spawn(work(number))
    await tasks.finish(1.0)
    tasks.spawn(work(5))
    await tasks.finish(1.0)
    assert (done, tasks.dropped) == ([0, 1, 5], 3)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_cancelled_work_has_ended_when_cancel_returns() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    tasks = BackgroundTasks()
    tasks.spawn(work())
    await asyncio.sleep(0)
    await tasks.cancel()
    assert ended == ["work"]
