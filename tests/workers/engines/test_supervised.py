"""An engine that ends or hangs: its calls fail at once, and the worker learns of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from ampd.types import Parallelism
from ampd.wire import engine_start
from tests.waiting import PATIENCE_S
from tests.workers.engines.modelled_lab import Lab, Times, prompt_of, run
from workers.engines import supervised
from workers.engines.base import EngineError, EngineLostError, EngineOutput, EngineRequest
from workers.engines.modelled import ModelledEngine
from workers.engines.supervised import SupervisedEngine

FOREVER_S = 3600.0


async def restart(engine: ModelledEngine) -> None:
    """What SGLang's adapter does with its processes."""
    await engine.stop()
    engine._requests.running.clear()
    engine._requests.waiting.clear()
    engine._requests.prefilling.clear()
    await engine.start()


@pytest.fixture
def restartable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelledEngine, "restart", restart, raising=False)


def broken(*_: object) -> float:
    raise ZeroDivisionError("the model broke")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "STALL_FLOOR_S", 0.2)
    monkeypatch.setattr(supervised, "CHECK_INTERVAL_S", 0.01)


@asynccontextmanager
async def supervision(folder: Path, times: Times) -> AsyncIterator[tuple[Any, asyncio.Task[str]]]:
    """A supervised engine, and the task that supervises it."""
    async with Lab(folder, times).engine("D") as engine, asyncio.timeout(PATIENCE_S):
        watched = SupervisedEngine(engine, times)
        lost = asyncio.create_task(watched.wait_lost())
        try:
            yield watched, lost
        finally:
            lost.cancel()


async def test_an_engine_that_hangs_in_a_step_fails_all_its_calls(model_folder: Path) -> None:
    async with supervision(model_folder, Times(step_s=FOREVER_S)) as (engine, lost):
        calls = [asyncio.create_task(run(engine, prompt_of(100, seed), 5)) for seed in range(3)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineLostError] * 3
        assert {end.status for end in ends if isinstance(end, EngineLostError)} == {502}
        assert "the engine hangs: 3 requests wait" in await lost
        with pytest.raises(EngineLostError, match="the engine hangs") as refusal:
            await run(engine, prompt_of(100), 5)
        assert refusal.value.status == 503


async def test_clients_that_give_up_early_do_not_hide_that_the_engine_hangs(model_folder: Path) -> None:
    async with supervision(model_folder, Times(step_s=FOREVER_S)) as (engine, lost):
        for seed in range(100):
            with suppress(TimeoutError, EngineLostError):
                async with asyncio.timeout(supervised.STALL_FLOOR_S / 2):
                    await run(engine, prompt_of(100, seed), 5)
            if lost.done():
                break
        assert "the engine hangs" in await lost


async def test_an_engine_that_ends_fails_the_calls_under_which_it_ends(model_folder: Path) -> None:
    async with supervision(model_folder, Times()) as (engine, lost):
        engine._engine._model.decode_step_s = broken
        with pytest.raises(EngineLostError) as failure:
            await run(engine, prompt_of(100), 5)
        assert failure.value.status == 502
        assert "the model broke" in await lost


@pytest.mark.slow
async def test_an_engine_that_is_idle_or_computes_a_long_prefill_does_not_hang(model_folder: Path) -> None:
    # One prefill takes longer than the floor, and far less than ten times its prediction.
    async with supervision(model_folder, Times(per_token_s=0.005)) as (engine, lost):
        assert len(await run(engine, prompt_of(100), 5)) == 5
        await asyncio.sleep(2 * supervised.STALL_FLOOR_S)
        assert len(await run(engine, prompt_of(100, seed=2), 5)) == 5
        assert not lost.done()


async def test_many_choices_of_a_prompt_may_take_longer(model_folder: Path) -> None:
    """The pass takes twice the bound of one choice, and a quarter of the bound of eight."""
    # The predicted prefill is a fifth of the floor, so the bound of one choice is twice the floor.
    times = Times(per_token_s=supervised.STALL_FLOOR_S / 500)
    async with supervision(model_folder, times) as (engine, lost):
        engine._engine._model = Times(per_token_s=times.per_token_s * 20)
        with pytest.raises(EngineLostError, match="hangs"):
            await run(engine, prompt_of(100), 1)
        assert await lost
    async with supervision(model_folder, times) as (engine, lost):
        engine._engine._model = Times(per_token_s=times.per_token_s * 20)
        options = {"sampling_options": {"n": 8}}
        call = EngineRequest(uuid4().hex, "s", prompt_of(100), 1, options)
        async with aclosing(engine.generate(call)) as outputs:
            assert {output.index async for output in outputs} == set(range(8))
        assert not lost.done()


class InTwoPasses:
    """An engine that begins the second choice of a prompt long after the first."""

    info = SimpleNamespace(parallelism=Parallelism(tp=1))

    async def generate(self, _request: EngineRequest) -> AsyncIterator[EngineOutput]:
        yield EngineOutput([1], index=0)
        await asyncio.sleep(5 * supervised.STALL_FLOOR_S)
        yield EngineOutput([1], index=1)

    async def wait_lost(self) -> str:
        return await asyncio.get_running_loop().create_future()


@pytest.mark.slow
async def test_a_choice_may_begin_long_after_another_one() -> None:
    engine: Any = InTwoPasses()
    watched = SupervisedEngine(engine, Times(per_token_s=supervised.STALL_FLOOR_S))
    lost = asyncio.create_task(watched.wait_lost())
    call = EngineRequest(uuid4().hex, "s", prompt_of(100), 1, {"sampling_options": {"n": 2}})
    async with aclosing(watched.generate(call)) as outputs:
        assert [output.index async for output in outputs] == [0, 1]
    assert not lost.done()
    lost.cancel()


@pytest.mark.slow
async def test_a_caller_that_takes_its_time_is_no_standstill(model_folder: Path) -> None:
    async with supervision(model_folder, Times()) as (engine, lost):
        call = EngineRequest(uuid4().hex, "s", prompt_of(100), 3)
        async with aclosing(engine.generate(call)) as outputs:
            async for _ in outputs:
                await asyncio.sleep(2 * supervised.STALL_FLOOR_S)
        assert not lost.done()


@pytest.mark.slow
async def test_time_in_which_the_worker_itself_was_stopped_is_no_standstill(model_folder: Path) -> None:
    async with supervision(model_folder, Times(step_s=0.05)) as (engine, lost):
        call = asyncio.create_task(run(engine, prompt_of(100), 10))
        await asyncio.sleep(0.12)
        time.sleep(3 * supervised.STALL_FLOOR_S)  # noqa: ASYNC251 - as SIGSTOP does
        assert len(await call) == 10
        assert not lost.done()


async def test_a_cancelled_call_is_cancelled_and_not_lost(model_folder: Path) -> None:
    async with supervision(model_folder, Times(step_s=0.05)) as (engine, lost):
        call = asyncio.create_task(run(engine, prompt_of(100), 500))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not lost.done()


@pytest.mark.usefixtures("restartable")
async def test_a_lost_engine_starts_again_and_its_old_calls_stay_failed(model_folder: Path) -> None:
    async with supervision(model_folder, Times()) as (engine, lost):
        idle = engine.generate(EngineRequest(uuid4().hex, "idle", prompt_of(100, seed=7), 50))
        await anext(idle)  # its caller takes its time
        times = engine._engine._model
        times.decode_step_s = broken
        with pytest.raises(EngineLostError) as failure:
            await run(engine, prompt_of(100), 5)
        assert failure.value.status == 502
        assert engine_start(str(failure.value)) == 1
        del times.decode_step_s
        async with asyncio.timeout(PATIENCE_S):
            while engine._lost is not None:
                with pytest.raises(EngineLostError):
                    await run(engine, prompt_of(100), 5)
                await asyncio.sleep(0.01)
        assert len(await run(engine, prompt_of(100), 5)) == 5
        with pytest.raises(EngineLostError) as late:
            await anext(idle)
        assert (late.value.status, engine_start(str(late.value))) == (502, 1)
        times.decode_step_s = broken
        with pytest.raises(EngineLostError) as failure:
            await run(engine, prompt_of(100), 5)
        assert engine_start(str(failure.value)) == 2
        assert not lost.done()


@pytest.mark.usefixtures("restartable")
async def test_an_engine_that_is_lost_again_and_again_stays_lost(model_folder: Path) -> None:
    async with supervision(model_folder, Times()) as (engine, lost):
        engine._engine._model.decode_step_s = broken
        async with asyncio.timeout(PATIENCE_S):
            while not lost.done():
                with pytest.raises(EngineLostError):
                    await run(engine, prompt_of(100), 5)
                await asyncio.sleep(0.01)
        assert engine._starts == supervised.MOST_RESTARTS
        assert "the model broke" in await lost


async def test_the_worker_is_absent_while_its_engine_starts_and_stays_so_if_it_does_not(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def absence() -> AsyncIterator[None]:
        steps.append("left")
        yield
        steps.append("back")

    async def fail_once(engine: ModelledEngine) -> None:
        steps.append("restart")
        if steps.count("restart") == 2:
            raise EngineError("no memory")
        await restart(engine)

    monkeypatch.setattr(ModelledEngine, "restart", fail_once, raising=False)
    async with Lab(model_folder, Times()).engine("D") as engine, asyncio.timeout(PATIENCE_S):
        watched = SupervisedEngine(engine, Times())
        lost = asyncio.create_task(watched.wait_lost(absence))
        engine._model.decode_step_s = broken
        while not lost.done():
            with pytest.raises(EngineLostError):
                await run(watched, prompt_of(100), 5)  # type: ignore[arg-type]
            await asyncio.sleep(0.01)
        assert steps == ["left", "restart", "back", "left", "restart"]
        assert (await lost).endswith("it did not start again: no memory")


async def test_an_engine_that_never_starts_again_stays_lost(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: ModelledEngine) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ModelledEngine, "restart", never, raising=False)
    monkeypatch.setattr(supervised, "LONGEST_RESTART_S", 0.05)
    async with supervision(model_folder, Times()) as (engine, lost):
        engine._lost = "it ended"
        engine._loss_seen.set()
        assert "did not start again within" in await lost
