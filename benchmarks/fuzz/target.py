"""One thing that is fuzzed, and the verdict on one input."""

from __future__ import annotations

import random
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

BOUND_S = 60.0
"""An input that takes longer is a hang. Valid ones take milliseconds, but a busy machine may stop for seconds."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parser or a receiver of messages.

    Attributes:
        make: makes an input, mostly a broken one.
        run: gives the input to the product. It asserts that an accepted input leads to no wrong decision.
        refusals: the errors by which the product refuses an input.
    """

    name: str
    make: Callable[[random.Random], Any]
    run: Callable[[Any], object]
    refusals: tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that was neither accepted nor refused properly."""

    target: str
    seed: str
    kind: str
    given: str
    trace: str


class _HangError(BaseException):
    """The bound is over. No `except Exception` of the product catches it."""


def try_one(target: Target, seed: str) -> str | Failure:
    """Make the input of a seed and run it; `accepted`, `refused`, or the failure."""
    given = target.make(random.Random(f"{target.name} {seed}"))
    try:
        with _bounded():
            target.run(given)
    except target.refusals:
        return "refused"
    except _HangError:
        return _failure(target, seed, "hang", given)
    except AssertionError:
        return _failure(target, seed, "wrong decision", given)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a SystemExit, or a panic of Rust
        return _failure(target, seed, "crash", given)
    return "accepted"


def _failure(target: Target, seed: str, kind: str, given: Any) -> Failure:
    try:
        shown = repr(given)
    except RecursionError:
        shown = "(nested too deeply to show)"
    return Failure(target.name, seed, kind, shown[:600], traceback.format_exc(limit=-4))


@contextmanager
def _bounded() -> Iterator[None]:
    def over(_signal: int, _frame: FrameType | None) -> None:
        raise _HangError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, BOUND_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
