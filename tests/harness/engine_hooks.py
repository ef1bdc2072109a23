"""Changes in the processes of an engine under test: SGLang starts them, so a patch in the test does not reach them."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import pytest


@contextmanager
def in_engine_processes(hook: Callable[..., None], *args: Any) -> Iterator[None]:
    """Call `hook` first in each process that SGLang starts meanwhile.

    It goes inside `tests.harness.forked_engines.forked_engines`.
    """
    start = multiprocessing.Process._Popen  # type: ignore[attr-defined]

    def start_with_hook(process: BaseProcess) -> Any:
        started: Any = process
        started._target, started._args = _hooked, (hook, args, started._target, *started._args)
        return start(process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.Process, "_Popen", staticmethod(start_with_hook))
        yield


def _hooked(hook: Callable[..., None], hook_args: tuple[Any, ...], target: Callable[..., Any], *args: Any) -> None:
    hook(*hook_args)
    target(*args)


def delay_rank(rank: int, longest_s: float) -> None:
    """Let a rank get each message, write each page and load each request later than the others, by random times."""
    from workers.kv.rank_process.page_loader import PageLoader
    from workers.kv.rank_process.rank_link import RankLink

    make, answer, copy = RankLink.__init__, RankLink._answer, PageLoader._copy
    rng = random.Random(rank)

    def pause(link: RankLink) -> None:
        if link._rank == rank:
            time.sleep(rng.uniform(0, longest_s))

    class SlowWriter:
        def __init__(self, link: RankLink, writer: Any) -> None:
            self._link, self._writer = link, writer

        def write(self, *args: Any) -> None:
            pause(self._link)
            self._writer.write(*args)

    def make_slow(
        link: RankLink, address: str, number: int, geometry: dict[str, object], writer: Any, *more: Any
    ) -> None:
        make(link, address, number, geometry, SlowWriter(link, writer), *more)

    def answer_late(link: RankLink, message: Any) -> None:
        pause(link)
        answer(link, message)

    def copy_late(loader: PageLoader, *args: Any) -> None:
        pause(loader._link)
        copy(loader, *args)

    patches: Any = RankLink, PageLoader
    patches[0].__init__, patches[0]._answer, patches[1]._copy = make_slow, answer_late, copy_late


def delay_loads(longest_s: float) -> None:
    """Let the copies of each request's pages to the device begin late: a layer that does not wait for its own shows."""
    from workers.kv.rank_process.page_loader import PageLoader

    copy = PageLoader._copy
    rng = random.Random(1)

    def copy_late(loader: PageLoader, *args: Any) -> None:
        time.sleep(rng.uniform(0, longest_s))
        copy(loader, *args)

    patched: Any = PageLoader
    patched._copy = copy_late
