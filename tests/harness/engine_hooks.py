"""Changes in the processes of an engine under test: SGLang starts them, so a patch in the test does not reach them."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def in_engine_processes(hook: Callable[..., None], *args: Any) -> Iterator[None]:
    """Call `hook` first in each process that SGLang starts meanwhile.

    It goes inside `tests.harness.forked_engines.forked_engines`.
    """
    start = multiprocessing.Process._Popen

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


class LateRank:
    """Which rank of each engine is late at the moment. A test chooses it while its engines run.

    Args:
        folder: of the test; a file in it tells the processes of the engines.
        longest_s: of one delay.
    """

    def __init__(self, folder: Path, longest_s: float) -> None:
        self._path = str(folder / "late-rank")
        self._longest_s = longest_s
        self.choose(0)

    def choose(self, rank: int) -> None:
        """From here on this rank is late, in the engines that have it."""
        new = Path(f"{self._path}.new")
        new.write_text(str(rank))
        new.replace(self._path)

    @contextmanager
    def in_engines(self) -> Iterator[None]:
        """Engines that start meanwhile have a late rank."""
        with in_engine_processes(delay_rank, self._path, self._longest_s):
            yield


def delay_rank(late: str, longest_s: float) -> None:
    """Let the rank that a file names do what ranks do each by itself later than the others, by random times.

    It gets each message, offers, writes and looks up pages, begins and ends loads, and forgets everything later.
    """
    from workers.kv.rank_process.page_loader import PageLoader
    from workers.kv.rank_process.rank_link import RankLink

    rng = random.Random(1)

    def pause(link: RankLink) -> None:
        if str(link._rank) == Path(late).read_text():
            time.sleep(rng.uniform(0, longest_s))

    class SlowWriter:
        def __init__(self, link: RankLink, writer: Any) -> None:
            self._link, self._writer = link, writer

        def write(self, *args: Any) -> None:
            pause(self._link)
            self._writer.write(*args)

    make, copy = RankLink.__init__, PageLoader._copy

    def make_slow(
        link: RankLink, address: str, number: int, geometry: dict[str, object], writer: Any, *more: Any
    ) -> None:
        make(link, address, number, geometry, SlowWriter(link, writer), *more)

    def copy_late(loader: PageLoader, *args: Any) -> None:
        pause(loader._link)
        copy(loader, *args)

    patches: Any = RankLink, PageLoader
    patches[0].__init__, patches[1]._copy = make_slow, copy_late
    for name in ("_answer", "offer", "loadable", "begin_load", "end_load", "reset"):
        setattr(RankLink, name, _after(pause, getattr(RankLink, name)))


def _after(pause: Callable[..., None], act: Callable[..., Any]) -> Callable[..., Any]:
    def late(link: Any, *args: Any) -> Any:
        pause(link)
        return act(link, *args)

    return late


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


def change_memory(factor: float) -> None:
    """Let SGLang find this many times as much free memory each time it looks, because of other processes."""
    import psutil

    looks = count()
    measured = psutil.virtual_memory

    def changed() -> Any:
        memory = measured()
        return memory._replace(available=int(factor ** next(looks) * memory.available))

    psutil.virtual_memory = changed
