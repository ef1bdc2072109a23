"""The prefill queue on asyncio, with orderings that wait and run several prefills in one pass; in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from ampd.perf.presets import load_performance_model
from ampd.policies.base import OrderingPolicy, OrderingSituation, Pick, Run, Wait
from ampd.policies.registry import create
from ampd.types import Parallelism, PrefillTask, Slo
from tests.virtual_time import run_virtually
from workers.prefill_queue import AsyncPrefillQueue

MODEL = load_performance_model("tiny-cpu")


@dataclass
class WaitThenAll:
    """Waits until so many are there, a second at a time; then runs all of them together."""

    count: int
    asked_s: list[float] = field(default_factory=list)

    def pick(self, situation: OrderingSituation) -> Pick:
        self.asked_s.append(situation.now_s)
        count = len(situation.queue)
        return Run(0, together=tuple(range(1, count))) if count >= self.count else Wait(1.0)


class Shell:
    """A queue on the running loop, handlers that use it, and when they began to compute."""

    def __init__(self, ordering: OrderingPolicy) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue = AsyncPrefillQueue(ordering, MODEL, Parallelism(), clock=self.loop.time)
        self.started_s: dict[str, float] = {}

    def handler(self, name: str, compute_s: float = 0.5, read_s: float = 0.0) -> asyncio.Task[None]:
        return asyncio.create_task(self._handle(name, compute_s, read_s))

    async def _handle(self, name: str, compute_s: float, read_s: float) -> None:
        task = PrefillTask(name, name, 0, 50, self.loop.time(), Slo(5, 1))
        with self.queue.place(task, read_s > 0) as place:
            await place.picked()
            await asyncio.sleep(read_s)
            await place.slot()
            self.started_s[name] = self.loop.time()
            await asyncio.sleep(compute_s)

    def timers(self) -> int:
        """Timers on the loop that were not cancelled."""
        return sum(not handle.cancelled() for handle in self.loop._scheduled)  # type: ignore[attr-defined]


def virtually(main: Coroutine[Any, Any, None], monkeypatch: pytest.MonkeyPatch) -> None:
    run_virtually(main, monkeypatch)


def test_the_policy_is_asked_again_when_its_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        shell = Shell(create("ordering", "laps", max_wait_s=0.4))
        await asyncio.gather(shell.handler("a"), shell.handler("b"))
        assert shell.started_s == pytest.approx({"a": 0.4 * 2 / 3, "b": 0.4 * 2 / 3})
        assert shell.timers() == 0

    virtually(main(), monkeypatch)


def test_who_comes_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        policy = WaitThenAll(2)
        shell = Shell(policy)
        first = shell.handler("a")
        await asyncio.sleep(2.5)
        assert policy.asked_s == pytest.approx([0, 1, 2])
        await asyncio.gather(first, shell.handler("b", read_s=0.25))
        assert shell.started_s == pytest.approx({"a": 2.75, "b": 2.75}), "together, when both have read"
        assert shell.timers() == 0

    virtually(main(), monkeypatch)


def test_a_handler_that_is_cancelled_takes_the_wait_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        policy = WaitThenAll(3)
        shell = Shell(policy)
        handlers = [shell.handler("a"), shell.handler("b")]
        await asyncio.sleep(0.5)
        assert shell.timers() == 1
        for handler, left in zip(handlers, (1, 0), strict=True):
            handler.cancel()
            await asyncio.gather(handler, return_exceptions=True)
            assert shell.timers() == left
        asked = len(policy.asked_s)
        await asyncio.sleep(10)
        assert len(policy.asked_s) == asked
        assert len(shell.queue) == 0

    virtually(main(), monkeypatch)


def test_who_is_cancelled_in_a_pass_does_not_hold_the_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        shell = Shell(WaitThenAll(3))
        handlers = [shell.handler(name, read_s=seconds) for name, seconds in (("a", 0.1), ("b", 100.0), ("c", 0.2))]
        await asyncio.sleep(1.0)
        assert shell.started_s == {}
        handlers[1].cancel()
        results = await asyncio.gather(*handlers, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), asyncio.CancelledError, type(None)]
        assert shell.started_s == pytest.approx({"a": 1.0, "c": 1.0})
        assert len(shell.queue) == 0

    virtually(main(), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ampd", "continuum", "edf", "fcfs", "hrrn", "jct", "laps", "shortest-prefill-first"])
def test_every_ordering_runs_everybody_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        dice = random.Random(name)
        shell = Shell(create("ordering", name))
        handlers = []
        for number in range(60):
            await asyncio.sleep(dice.expovariate(20.0))
            handlers.append(shell.handler(str(number), dice.random() * 0.1, dice.choice([0.0, 0.02])))
        cancelled = dice.sample(handlers, 8)
        for handler in cancelled:
            handler.cancel()
            await asyncio.sleep(0.05)
        results = await asyncio.gather(*handlers, return_exceptions=True)
        stopped = [isinstance(result, asyncio.CancelledError) for result in results]
        assert all(handler in cancelled for handler, was in zip(handlers, stopped, strict=True) if was)
        assert {str(number) for number, was in enumerate(stopped) if not was} <= set(shell.started_s)
        assert len(shell.queue) == 0
        assert shell.timers() == 0

    virtually(main(), monkeypatch)
