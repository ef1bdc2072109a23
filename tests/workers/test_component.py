"""A worker as Dynamo's component: what ends it, and what it does with an error of its own tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from ampd.call_signatures import Verifier
from ampd.errors import RunError
from ampd.types import Parallelism
from ampd.wire import GENERATE_ENDPOINT, KV_ENDPOINT, PREFILL_ENDPOINT
from tests.harness.scripted_endpoint import ScriptedEndpoint, SlowEndpoint
from tests.memory_store import MemoryState, MemoryStore
from tests.virtual_time import run_virtually
from tests.waiting import until
from tests.workers.engines.modelled_lab import Times
from tests.workers.parts_lab import worker_parts
from workers.call_guard import CallGuard
from workers.component import Worker
from workers.engines.modelled import ModelledEngine
from workers.engines.modelled_tokens import read_model_folder
from workers.engines.supervised import SupervisedEngine
from workers.publisher import Publisher
from workers.worker_recorder import WorkerRecorder

EngineT = TypeVar("EngineT", bound=ModelledEngine)


class Runtime:
    """Dynamo's runtime without Dynamo: its endpoints are served until it is shut down."""

    def __init__(self) -> None:
        self.is_shut_down = asyncio.Event()
        self.is_healthy = False

    def shutdown(self) -> None:
        self.is_shut_down.set()

    def set_health_status(self, is_healthy: bool) -> None:
        self.is_healthy = is_healthy

    def register_engine_route(self, _name: str, _answer: Any) -> None:
        """The route that the liveness probe asks."""


def guard() -> CallGuard:
    """Lets every call pass."""
    return CallGuard(Verifier((), "w"), WorkerRecorder())


class Endpoint(ScriptedEndpoint):
    """Is served as long as its runtime."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime

    async def serve_endpoint(self, handler: Any) -> None:
        self.handler = handler
        await self._runtime.is_shut_down.wait()


def endpoints_of(runtime: Runtime) -> Any:
    return {name: Endpoint(runtime) for name in (PREFILL_ENDPOINT, GENERATE_ENDPOINT, KV_ENDPOINT)}


def modelled(kind: type[EngineT], model_folder: Path) -> EngineT:
    return kind(read_model_folder(model_folder), Times(), Parallelism(), 100_000, 100_000)


async def started(inner: ModelledEngine) -> SupervisedEngine:
    engine = SupervisedEngine(inner, Times())
    await engine.start()
    engine.kv.connect(None, lambda *_: None)  # type: ignore[arg-type]
    return engine


def test_a_worker_that_stands_still_while_it_enters_discovery_enters_again(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")

    async def scenario() -> None:
        runtime, state = Runtime(), MemoryState(asyncio.get_running_loop().time)
        engine = await started(modelled(ModelledEngine, model_folder))
        endpoints = endpoints_of(runtime)
        endpoints[GENERATE_ENDPOINT].is_registered = False
        parts = worker_parts("w", engine, Times(), store=MemoryStore(state))
        running = asyncio.create_task(Worker(cast(Any, runtime), parts, endpoints, guard(), cast(Any, None)).run())
        await until(MemoryStore(state).snapshot)
        assert [endpoint.calls for endpoint in endpoints.values()] == [[], ["enter"], []]
        runtime.shutdown()
        await running
        await engine.stop()

    run_virtually(
        scenario(), monkeypatch, "workers.publisher", "workers.pending_changes", "workers.engines.modelled_request"
    )


class SlowToEnter(SlowEndpoint):
    """Is served as long as its runtime, and enters discovery again only when it is told to."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime

    async def serve_endpoint(self, _handler: Any) -> None:
        await self._runtime.is_shut_down.wait()


def test_an_entry_that_is_still_written_when_the_worker_ends_goes_too(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    left: list[list[str]] = []

    async def leave(_runtime: Any, entries: Any, **_: object) -> None:
        for entry in entries:
            await entry.unregister_endpoint_instance()

    monkeypatch.setattr("workers.component.graceful_shutdown_with_discovery", leave)

    async def scenario() -> None:
        runtime, state = Runtime(), MemoryState(asyncio.get_running_loop().time)
        engine = await started(modelled(ModelledEngine, model_folder))
        endpoints = endpoints_of(runtime)
        slow = endpoints[GENERATE_ENDPOINT] = SlowToEnter(runtime)
        parts = worker_parts("w", engine, Times(), store=MemoryStore(state))
        worker = Worker(cast(Any, runtime), parts, endpoints, guard(), cast(Any, None))
        running = asyncio.create_task(worker.run())
        await until(MemoryStore(state).snapshot)
        slow.is_registered = False
        await asyncio.sleep(60.0)  # it is being written again
        worker._begin_shutdown()
        await asyncio.sleep(60.0)
        slow.may_write.set()
        await asyncio.sleep(60.0)
        left.append(slow.calls)
        runtime.shutdown()
        await running
        await engine.stop()

    run_virtually(
        scenario(), monkeypatch, "workers.publisher", "workers.pending_changes", "workers.engines.modelled_request"
    )
    assert left == [["enter", "leave"]]


class BlindEngine(ModelledEngine):
    """Its own watch fails at first; later it reports that the engine is lost."""

    errors = 2

    async def wait_lost(self) -> str:
        await asyncio.sleep(1.0)
        if self.errors:
            self.errors -= 1
            raise OSError("cannot look")
        return "the engine has ended"


def test_an_error_of_the_watch_is_logged_and_the_engine_is_watched_again(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        runtime, state = Runtime(), MemoryState(asyncio.get_running_loop().time)
        engine = await started(modelled(BlindEngine, model_folder))
        endpoints = endpoints_of(runtime)
        parts = worker_parts("w", engine, Times(), store=MemoryStore(state))
        running = asyncio.create_task(Worker(cast(Any, runtime), parts, endpoints, guard(), cast(Any, None)).run())
        await until(MemoryStore(state).snapshot)
        assert runtime.is_healthy
        with pytest.raises(RunError, match="the engine has ended"):
            await asyncio.wait_for(running, 600.0)
        assert not runtime.is_healthy
        assert await MemoryStore(state).snapshot() == []
        await engine.stop()

    run_virtually(
        scenario(), monkeypatch, "workers.publisher", "workers.pending_changes", "workers.engines.modelled_request"
    )
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == ["engine-watch failed; trying again"] * 2
    assert all("cannot look" in (record.exc_text or str(record.exc_info)) for record in errors)


class LostOnceEngine(ModelledEngine):
    """Is lost after a second, and starts again."""

    workers_meanwhile: list[str] | None = None
    store: MemoryStore

    async def wait_lost(self) -> str:
        if self.workers_meanwhile is None:
            await asyncio.sleep(1.0)
            return "the engine has ended"
        return await super().wait_lost()

    async def restart(self) -> None:
        await self.stop()
        self.workers_meanwhile = [view.worker_id for view in await self.store.snapshot()]
        await self.start()


def test_a_worker_is_out_of_the_shared_state_while_its_engine_starts_again(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        runtime, state = Runtime(), MemoryState(asyncio.get_running_loop().time)
        inner = modelled(LostOnceEngine, model_folder)
        inner.store = MemoryStore(state)
        engine = await started(inner)
        endpoints = endpoints_of(runtime)
        parts = worker_parts("w", engine, Times(), store=MemoryStore(state))
        running = asyncio.create_task(Worker(cast(Any, runtime), parts, endpoints, guard(), cast(Any, None)).run())
        await until(lambda: inner.workers_meanwhile is not None)
        await until(inner.store.snapshot)
        assert inner.workers_meanwhile == []
        assert runtime.is_healthy, "a failing liveness probe would end the process"
        assert not running.done()
        runtime.shutdown()
        await running
        await engine.stop()

    run_virtually(
        scenario(), monkeypatch, "workers.publisher", "workers.pending_changes", "workers.engines.modelled_request"
    )
    assert "the engine has ended; the engine starts again" in caplog.text


class LateEndpoint(Endpoint):
    """Its client comes after a while."""

    def __init__(self, runtime: Runtime, after_s: float) -> None:
        super().__init__(runtime)
        self._after_s = after_s

    async def client(self) -> Any:
        await asyncio.sleep(self._after_s)
        return await super().client()


class SlowToStartEngine(LostOnceEngine):
    """Is away from 1 s to 4 s. Its start may fail once, with an error that nobody expects."""

    error: Exception | None = None

    async def restart(self) -> None:
        await asyncio.sleep(3.0)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        await super().restart()


@dataclass
class Scene:
    """A worker whose engine is lost after a second."""

    inner: SlowToStartEngine
    worker: Worker
    publisher: Publisher
    running: asyncio.Task[None]

    async def present(self) -> list[str]:
        return [view.worker_id for view in await self.inner.store.snapshot()]


@asynccontextmanager
async def scene(model_folder: Path, registered_s: float, error: Exception | None = None) -> AsyncIterator[Scene]:
    runtime = Runtime()
    inner = SlowToStartEngine(read_model_folder(model_folder), Times(), Parallelism(), 100_000, 100_000)
    inner.store, inner.error = MemoryStore(MemoryState(asyncio.get_running_loop().time)), error
    engine = SupervisedEngine(inner, Times())
    await engine.start()
    engine.kv.connect(None, lambda *_: None)  # type: ignore[arg-type]
    endpoints: Any = {name: Endpoint(runtime) for name in (GENERATE_ENDPOINT, KV_ENDPOINT)}
    endpoints[PREFILL_ENDPOINT] = LateEndpoint(runtime, registered_s)
    parts = worker_parts("w", engine, Times(), store=inner.store)
    worker = Worker(cast(Any, runtime), parts, endpoints, guard(), cast(Any, None))
    made = Scene(inner, worker, parts.publisher, asyncio.create_task(worker.run()))
    yield made
    runtime.shutdown()
    await made.running
    await engine.stop()


VIRTUAL = ("workers.publisher", "workers.pending_changes", "workers.engines.modelled_request")


@pytest.mark.parametrize("registered_s", [2.0, 9.0])
def test_an_engine_that_is_lost_before_the_registration_delays_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, registered_s: float
) -> None:
    """Nobody publishes for the worker before it can be called, or after it has left."""

    async def scenario() -> None:
        async with scene(model_folder, registered_s) as made:
            await until(made.present)
            assert made.inner.workers_meanwhile == []
            assert asyncio.get_running_loop().time() >= max(registered_s, 4.0)
            await made.publisher.retire()
            await asyncio.sleep(60.0)
            assert await made.present() == []

    run_virtually(scenario(), monkeypatch, *VIRTUAL)


def test_a_worker_whose_engine_starts_at_the_second_try_comes_back(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with scene(model_folder, 0.0, OSError("no space left on device")) as made:
            await until(made.present)
            await until(lambda: made.inner.workers_meanwhile is not None)
            assert made.inner.workers_meanwhile == []
            await until(made.present)

    run_virtually(scenario(), monkeypatch, *VIRTUAL)


def test_a_worker_that_is_ending_does_not_enter_the_shared_state(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drain(*_: object, **__: object) -> None:
        await asyncio.sleep(30.0)

    monkeypatch.setattr("workers.component.graceful_shutdown_with_discovery", drain)

    async def scenario() -> None:
        async with scene(model_folder, 2.0) as made:
            await asyncio.sleep(3.0)  # its engine is away
            made.worker._begin_shutdown()
            await asyncio.sleep(10.0)
            assert await made.present() == []

    run_virtually(scenario(), monkeypatch, *VIRTUAL)
