"""Work on all cores of the machine, in processes that can be ended at any time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from ampd.child_process import end_with_parent
from ampd.errors import RunError
from ampd.progress import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    work: Callable[[Item], Result], items: Sequence[Item], label: str, jobs: int | None = None
) -> list[Result]:
    """`work` of every item, in the order of the items, with a progress bar. The results must be picklable.

    `jobs`: processes, by default one per core. With one process or one item, everything runs in this process.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(items))
    if jobs <= 1:
        return list(_shown(map(work, items), len(items), label))
    processes = Processes(lambda number: work(items[number]), jobs)
    try:
        found = dict(_shown(processes.results(range(len(items))), len(items), label))
    finally:
        processes.close()
    return [found[number] for number in range(len(items))]


def _shown(results: Iterable[Result], total: int, label: str) -> Iterator[Result]:
    with Progress(label, total) as progress:
        for result in results:
            progress.update()
            yield result


class Processes:
    """Calls `work` with items, in processes.

    They are forked with the first items, and have what this process has by then. Until then it should have no thread
    that could hold a lock.

    Args:
        work: a function whose results and exceptions must be picklable.
        count: how many processes.
    """

    def __init__(self, work: Callable[[Any], Any], count: int) -> None:
        self._work = work
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def results(self, items: Iterable[Any], timeout_s: float | None = None) -> Iterator[tuple[Any, Any]]:
        """Each item with its result, as soon as it is done. Close the processes if you stop before the end.

        Raises:
            TimeoutError: the seconds are over.
            RunError: a process ended, for example because the machine has no memory left.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise TimeoutError
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._count, get_context("fork"), _begin, (self._work, os.getpid()))
        try:
            by_future = {self._pool.submit(_result, item): item for item in items}
            for future in as_completed(by_future, timeout_s):
                yield by_future[future], future.result()
        except BrokenProcessPool:
            raise RunError(
                "a process of the simulation ended, perhaps for want of memory; try a smaller --jobs"
            ) from None

    def close(self) -> None:
        """End the processes, also those that work."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown()


_works: list[Callable[[Any], Any]] = []
"""In a process of the pool: its work."""


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    end_with_parent(signal.SIGKILL, parent)
    # Ctrl-C is for the process that waits. It may have its own way of ending, which this one must not inherit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _works.append(work)


def _result(item: Any) -> Any:
    return _works[0](item)
