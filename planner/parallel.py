"""Runs independent work on all cores of the machine, with a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    work: Callable[[Item], Result], items: Sequence[Item], label: str, jobs: int | None = None
) -> list[Result]:
    """`work` of every item, in the order of the items; `work` and the items must be picklable.

    `jobs`: processes, by default one per core. With one process or one item, everything runs in this process.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(items))
    if jobs <= 1:
        return list(_shown(map(work, items), len(items), label))
    # Forked, so that the work begins at once. This process has no threads that could hold a lock.
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        return list(_shown(pool.map(work, items), len(items), label))


def _shown(results: Iterable[Result], total: int, label: str) -> Iterable[Result]:
    return tqdm(results, total=total, desc=label, file=sys.stderr, disable=None, leave=False)
