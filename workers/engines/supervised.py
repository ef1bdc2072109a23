"""An engine under supervision: when it ends or hangs, all its calls fail at once, and it starts again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from typing import Any, cast

from ampd.perf.model import PerformanceModel
from workers.engines.base import (
    Engine,
    EngineError,
    EngineInfo,
    EngineLoad,
    EngineLostError,
    EngineOutput,
    EngineRequest,
    RestartableEngine,
)
from workers.kv.exchange import KvExchange

log = logging.getLogger(__name__)

MOST_RESTARTS = 3
"""An engine that is lost more often than this within `RESTART_WINDOW_S` stays lost."""

RESTART_WINDOW_S = 600.0

LONGEST_RESTART_S = 1800.0
"""An engine that takes longer to start again hangs. A large model takes minutes to load."""

STALL_FLOOR_S = 60.0
"""An engine never counts as hung before it has stood still for this time. Compilation and grammars take seconds."""

STALL_FACTOR = 10.0
"""An engine hangs if it stands still for this many times the predicted time of the longest prefill that it has."""

CHECK_INTERVAL_S = 0.5
_UNWIND_S, _UNWIND_POLL_S = 5.0, 0.005


class _Call:
    """A call of the engine.

    Args:
        request: what is asked for.
        choice_s: the predicted time of the prefill of one choice.

    Attributes:
        start: how often the engine had been started when the call began.
        task: the task that waits for its next output; None: the caller does not ask for one now.
    """

    __slots__ = ("_begun", "_choice_s", "_choices", "start", "task", "was_failed")

    def __init__(self, request: EngineRequest, choice_s: float, start: int) -> None:
        self._choices = request.choices
        self._choice_s = choice_s
        self._begun: set[int] = set()
        self.start = start
        self.task: asyncio.Task[Any] | None = None
        self.was_failed = False

    @property
    def prefill_s(self) -> float:
        """The predicted time of what is left of its prefills.

        Each choice counts until its first output, because an engine may begin some choices long before others.
        """
        return self._choice_s * (self._choices - len(self._begun))

    def lost(self, line: str) -> EngineLostError:
        """The call's error when the engine was lost under it."""
        return EngineLostError(line, has_run=True, start=self.start + 1)

    def take(self, output: EngineOutput) -> None:
        """Note which choice has an output."""
        self._begun.add(output.index)


class SupervisedEngine:
    """`Engine` around another engine. `wait_lost` must run, because it does the supervision.

    An engine stands still while calls wait for it and no output comes. It computes one prefill after another, and each
    ends with an output. So it hangs if none comes for many times the predicted time of the longest.

    Time in which no call waits does not count. So clients that give up early do not hide it.

    Args:
        model: predicts the times of the engine.
    """

    def __init__(self, engine: Engine, model: PerformanceModel, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._model = model
        self._clock = clock
        self._waiting: set[_Call] = set()
        self._progress_s = self._idle_since_s = clock()
        self._lost: str | None = None
        self._loss_seen = asyncio.Event()
        self._starts = 0
        self._restarted_s: deque[float] = deque(maxlen=MOST_RESTARTS)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def kv(self) -> KvExchange[Any]:
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
        prefill_s = self._model.prefill_s(0, len(request.token_ids), self.info.parallelism)
        # Choices begin together. On a CPU that takes long even if their prompt is computed once.
        call = _Call(request, prefill_s, self._starts)
        outputs = cast(AsyncGenerator[EngineOutput, None], self._engine.generate(request))
        async with aclosing(outputs):
            while (output := await self._next(call, outputs)) is not None:
                yield output

    async def wait_lost(self, absence: Callable[[], AbstractAsyncContextManager[None]] = nullcontext) -> str:
        """Fail all calls whenever the engine has ended or hangs, and start it again if it can be.

        Args:
            absence: entered before the engine starts again, and left when it serves again.

        Returns:
            One line, when the engine stays lost.
        """
        while True:
            self._lost = line = self._lost or await self._loss()
            await self._fail_calls()
            if not isinstance(self._engine, RestartableEngine) or not self._may_restart():
                return line
            log.error("%s; the engine starts again, its KV in host memory stays", line)
            try:
                async with absence(), asyncio.timeout(LONGEST_RESTART_S):
                    await self._engine.restart()
                    self._starts += 1
                    self._progress_s = self._clock()
                    self._loss_seen.clear()
                    self._lost = None
            except EngineError as error:
                return f"{line}; it did not start again: {error}"
            except TimeoutError:
                return f"{line}; it did not start again within {LONGEST_RESTART_S:g} s"
            log.warning("the engine serves again")

    async def _loss(self) -> str:
        """Return, with one line, when the engine has ended or hangs, or when a call found it so."""
        ended = asyncio.create_task(self._engine.wait_lost())
        seen = asyncio.create_task(self._loss_seen.wait())
        try:
            while True:
                checked_s = self._clock()
                await asyncio.wait({ended, seen}, timeout=CHECK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
                self._leave_out_pause(checked_s)
                if ended.done():
                    return ended.result()
                if line := self._lost or self._standstill():
                    return line
        finally:
            ended.cancel()
            seen.cancel()

    def _may_restart(self) -> bool:
        now_s, before_s = self._clock(), self._restarted_s
        if len(before_s) == MOST_RESTARTS and now_s - before_s[0] < RESTART_WINDOW_S:
            return False
        before_s.append(now_s)
        return True

    async def _fail_calls(self) -> None:
        for call in self._waiting:
            if call.task is not None:
                call.was_failed = True
                call.task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNWIND_S):
                while self._waiting:  # noqa: ASYNC110
                    await asyncio.sleep(_UNWIND_POLL_S)

    async def _next(self, call: _Call, outputs: AsyncGenerator[EngineOutput, None]) -> EngineOutput | None:
        if self._lost is not None or call.start != self._starts:
            raise call.lost(self._lost or "the engine was started again")
        if not self._waiting:
            now_s = self._clock()
            self._progress_s = min(now_s, self._progress_s + now_s - self._idle_since_s)
        call.task = asyncio.current_task()
        self._waiting.add(call)
        try:
            output = await anext(outputs, None)
        except asyncio.CancelledError:
            if not call.was_failed or (call.task is not None and call.task.uncancel()):
                raise
            raise call.lost(str(self._lost)) from None
        except EngineLostError as error:
            if call.start == self._starts:
                self._lost = self._lost or str(error)
                self._loss_seen.set()
            raise (call.lost(str(error)) if error.has_run else error) from None
        finally:
            self._waiting.discard(call)
            self._idle_since_s = self._clock()
        if output is not None:
            call.take(output)
        self._progress_s = self._clock()
        return output

    def _leave_out_pause(self, checked_s: float) -> None:
        """Do not count the time in which this process did not run (it was stopped, or its machine was).

        Args:
            checked_s: when the wait for the next check began.
        """
        now_s = self._clock()
        paused_s = now_s - checked_s - CHECK_INTERVAL_S
        if paused_s > CHECK_INTERVAL_S:
            self._progress_s = min(now_s, self._progress_s + paused_s)

    def _standstill(self) -> str | None:
        """One line if the engine hangs."""
        now_s = self._clock()
        if not self._waiting:
            return None
        bound_s = max(STALL_FLOOR_S, STALL_FACTOR * max(call.prefill_s for call in self._waiting))
        if now_s - self._progress_s <= bound_s:
            return None
        return f"the engine hangs: {len(self._waiting)} requests wait and nothing came for {bound_s:.0f} s"
