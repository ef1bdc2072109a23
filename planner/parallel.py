"""Work on all cores of the machine, in processes that can be ended at any time.

An executor of Python 3.11 cannot be ended at any time: if its processes end while cancelled tasks wait, its thread
fails. These processes need no thread. Each one has a pipe, gets one task at a time, and is killed when nothing waits
for it any more.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

from ampd.errors import RunError
from ampd.progress import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")
_LONGEST_S = 1e6
"""Nothing waits for longer."""


def in_parallel(
    work: Callable[[Item], Result], items: Sequence[Item], label: str, jobs: int | None = None
) -> list[Result]:
    """`work` of every item, in the order of the items, with a progress bar. The results must be picklable.

    `jobs`: processes, by default one per core. With one process or one item, everything runs in this process.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(items))
    if jobs <= 1:
        return list(_shown(map(work, items), len(items), label))
    left = iter(range(len(items)))
    processes = Processes(lambda number: work(items[number]), jobs)
    try:
        found = dict(_shown(processes.results(lambda: next(left, None)), len(items), label))
    finally:
        processes.close()
    return [found[number] for number in range(len(items))]


def _shown(results: Iterable[Result], total: int, label: str) -> Iterator[Result]:
    with Progress(label, total) as progress:
        for result in results:
            progress.update()
            yield result


class _Worker(NamedTuple):
    process: Any
    pipe: Connection


class Processes:
    """Calls `work` with items, in processes.

    They are forked with the first items, so that the work begins at once. Until then this process should have no thread
    that could hold a lock.

    Args:
        work: a function whose results and exceptions must be picklable.
        count: how many processes.
    """

    def __init__(self, work: Callable[[Any], Any], count: int) -> None:
        self._work = work
        self._count = count
        self._workers: list[_Worker] = []

    def results(self, next_item: Callable[[], Any | None], timeout_s: float = _LONGEST_S) -> Iterator[tuple[Any, Any]]:
        """Each item with its result, as soon as it is done. Close the processes if you stop before the end.

        Args:
            next_item: asked whenever a process is free. None: there is nothing to do until another result is there.

        Raises:
            TimeoutError: the seconds are over.
            RunError: a process ended, for example because the machine has no memory left.
        """
        end_s = time.monotonic() + timeout_s
        free = list(self._workers)
        busy: dict[Any, tuple[_Worker, Any]] = {}
        while True:
            while (free or not self._workers) and (item := next_item()) is not None:
                if time.monotonic() >= end_s:
                    raise TimeoutError
                if not self._workers:
                    self._fork()
                    free = list(self._workers)
                worker = free.pop()
                _send(worker, item)
                busy[worker.pipe] = worker, item
            if not busy:
                return
            ready = wait(list(busy), max(end_s - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError
            for pipe in ready:
                worker, item = busy.pop(pipe)
                free.append(worker)
                yield item, _received(worker)

    def close(self) -> None:
        """End the processes, also those that work."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    def _fork(self) -> None:
        context = get_context("fork")
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            # A forked process has copies of our ends. While it has one, it does not see that this process has gone.
            inherited = [*(worker.pipe for worker in self._workers), ours]
            process = context.Process(target=_serve, args=(self._work, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))


def _serve(work: Callable[[Any], Any], pipe: Connection, inherited: Sequence[Connection]) -> None:
    """In a process: work until it is killed, or the other end of the pipe is gone."""
    for end in inherited:
        end.close()
    # Ctrl-C is for the process that waits. It may have its own way of ending, which this one must not inherit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        try:
            outcome = True, work(item)
        except Exception as error:
            outcome = False, error
        try:
            pipe.send(outcome)
        except BrokenPipeError:
            return


def _send(worker: _Worker, item: Any) -> None:
    try:
        worker.pipe.send(item)
    except OSError:
        raise _ended(worker) from None


def _received(worker: _Worker) -> Any:
    try:
        is_result, outcome = worker.pipe.recv()
    except (EOFError, OSError):
        raise _ended(worker) from None
    if not is_result:
        raise outcome
    return outcome


def _ended(worker: _Worker) -> RunError:
    worker.process.join()
    return RunError(f"a process of the simulation ended (exit code {worker.process.exitcode}); try a smaller --jobs")
