"""An event loop whose clock jumps to the next timer: what sleeps in real life takes no time and is exact."""

from __future__ import annotations

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")


class _Selector(selectors.SelectSelector):
    """Does not wait: moves the clock on by the time that it should have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits for something that will never come")
        # Never less than a nanosecond: a smaller step could be lost in rounding, and the timer would not come due.
        self.now_s += max(timeout, 1e-9) if timeout > 0 else 0.0
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """asyncio without waiting."""

    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorator: an async test runs on a loop without waiting. What it tests may read only the clock of the loop."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*arguments, **fixtures))

    return run


def run_virtually(main: Coroutine[Any, Any, Result], monkeypatch: pytest.MonkeyPatch, *modules: str) -> Result:
    """Run `main` to its end; the `time` of `modules` is the loop's clock meanwhile."""
    loop = VirtualTimeLoop()
    clock = SimpleNamespace(**{**vars(time), "monotonic": loop.time, "perf_counter": loop.time})
    for module in modules:
        monkeypatch.setattr(f"{module}.time", clock)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
