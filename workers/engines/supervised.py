"""An engine under supervision: when it ends or hangs, all its calls fail at once and the worker ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, cast

from ampd.perf.model import PerformanceModel
from workers.engines.base import (
    Engine,
    EngineInfo,
    EngineLoad,
    EngineLostError,
    EngineOutput,
    EngineRequest,
    WatchedEngine,
)
from workers.kv.exchange import KvExchange

STALL_FLOOR_S = 60.0
"""An engine never counts as hung before it has stood still for this time. Compilation and grammars take seconds."""

STALL_FACTOR = 10.0
"""An engine hangs if it stands still for this many times the predicted time of the longest prefill that it has."""

CHECK_INTERVAL_S = 0.5


class _Call:
    """A call of the engine.

    Attributes:
        prefill_s: the predicted time of its prefill; 0 after its first output.
        task: the task that waits for its next output; None: the caller does not ask for one now.
    """

    __slots__ = ("prefill_s", "task", "was_failed")

    def __init__(self, prefill_s: float) -> None:
        self.prefill_s = prefill_s
        self.task: asyncio.Task[Any] | None = None
        self.was_failed = False


class SupervisedEngine:
    """`Engine` and `WatchedEngine` around another engine. `wait_lost` must run, because it does the supervision.

    An engine stands still while calls wait for it and neither an output comes nor more KV is stored.

    Args:
        model: predicts the times of the engine.
    """

    def __init__(self, engine: Engine, model: PerformanceModel, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._model = model
        self._clock = clock
        self._waiting: set[_Call] = set()
        self._progress_s = clock()
        self._activity = 0
        self._lost: str | None = None

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def kv(self) -> KvExchange:
        return self._engine.kv

    async def start(self) -> None:
        await self._engine.start()

    async def stop(self) -> None:
        await self._engine.stop()

    def load(self) -> EngineLoad:
        return self._engine.load()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._lost is not None:
            raise EngineLostError(self._lost)
        call = _Call(self._model.prefill_s(0, len(request.token_ids), self.info.parallelism))
        outputs = cast(AsyncGenerator[EngineOutput, None], self._engine.generate(request))
        async with aclosing(outputs):
            while (output := await self._next(call, outputs)) is not None:
                yield output

    async def wait_lost(self) -> str:
        """Fail all calls and return, with one line, when the engine has ended or hangs."""
        ended = asyncio.create_task(self._ended())
        try:
            while self._lost is None:
                await asyncio.wait({ended}, timeout=CHECK_INTERVAL_S)
                self._lost = ended.result() if ended.done() else self._standstill()
        finally:
            ended.cancel()
        for call in self._waiting:
            if call.task is not None:
                call.was_failed = True
                call.task.cancel()
        return self._lost

    async def _next(self, call: _Call, outputs: AsyncGenerator[EngineOutput, None]) -> EngineOutput | None:
        if not self._waiting:
            self._progress_s = self._clock()  # an idle engine does not stand still
        call.task = asyncio.current_task()
        self._waiting.add(call)
        try:
            output = await anext(outputs, None)
        except asyncio.CancelledError:
            if not call.was_failed or (call.task is not None and call.task.uncancel()):
                raise
            raise EngineLostError(str(self._lost), has_run=True) from None
        finally:
            self._waiting.discard(call)
        call.prefill_s = 0.0
        self._progress_s = self._clock()
        return output

    async def _ended(self) -> str:
        if isinstance(self._engine, WatchedEngine):
            return await self._engine.wait_lost()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    def _standstill(self) -> str | None:
        """One line if the engine hangs."""
        now_s, activity = self._clock(), self.kv.activity
        if activity > self._activity:
            self._progress_s = now_s  # a prefill stores its pages as it computes them
        self._activity = activity
        if not self._waiting:
            return None
        bound_s = max(STALL_FLOOR_S, STALL_FACTOR * max(call.prefill_s for call in self._waiting))
        if now_s - self._progress_s <= bound_s:
            return None
        return f"the engine hangs: {len(self._waiting)} requests wait and nothing was computed for {bound_s:.0f} s"
