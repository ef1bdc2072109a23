"""All searches of a contest over the machine's cores; every result is on disk at once, and none is made twice."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ampd.errors import UserError
from benchmarks.policies.contest import (
    CRITERIA,
    TARGET,
    USUAL,
    Condition,
    Contestant,
    Found,
    Point,
    fields_of,
    find,
    measure,
    run,
)
from benchmarks.policies.prepared import Prepared
from benchmarks.policies.settings import Setting

_NEAR_STEP = 1.1
"""First step of a search that begins at what another seed has found."""


@dataclass(frozen=True)
class Task:
    """One search, or with `rates` one simulation at each of them."""

    setting: Setting
    contestant: Contestant
    seed: int
    condition: Condition = USUAL
    rates: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """The same for the same work, whatever the contestant is called."""
        return repr((self.setting, self.contestant.spec, self.seed, self.condition, self.rates, TARGET))


@dataclass(frozen=True)
class Job:
    """A task and where its search begins."""

    task: Task
    start: dict[str, float] | None
    prepared: Prepared


@dataclass
class Ledger:
    """Results by task, kept in a file of JSON lines; None: kept here only.

    Args:
        again: labels of contestants whose results in the file no longer count, because their code has changed.

    Raises:
        UserError: the file holds something else.
    """

    path: Path | None
    again: frozenset[str] = frozenset()
    results: dict[str, Found] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                # The run was stopped while it wrote: that result is made again.
                self.path.write_text("".join(lines[:-1]), encoding="utf-8")
                break
            try:
                row = json.loads(line)
                points = {float(rate): Point(**fields) for rate, fields in row["points"].items()}
                if row["contestant"] not in self.again:
                    self.results[row["key"]] = Found(row["goodput"], points)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(
                    f"{self.path}, line {number}: is no result of this benchmark; give another file"
                ) from None

    def found(self, task: Task) -> Found | None:
        """A result, if there is one."""
        return self.results.get(task.key)

    def keep(self, task: Task, found: Found, seconds: float) -> None:
        """Add a result, and write it down."""
        self.results[task.key] = found
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(_row(task, found, seconds)) + "\n")


def _row(task: Task, found: Found, seconds: float) -> dict[str, Any]:
    return {
        "setting": task.setting.name,
        "contestant": task.contestant.label,
        "seed": task.seed,
        "condition": task.condition.name,
        "goodput": found.goodput,
        "seconds": round(seconds, 1),
        "points": {repr(rate): fields_of(point) for rate, point in sorted(found.points.items())},
        "key": task.key,
    }


def search_all(
    ledger: Ledger,
    pairs: Iterable[tuple[Setting, Contestant, Condition]],
    seeds: int,
    prepared: Prepared,
    jobs: int,
    race: float = 0.0,
) -> None:
    """The goodput of every pair at every seed.

    The first seed searches from what `always-remote` carries, the others begin at its result. `race`: contestants
    whose first seed is below this share of the setting's best get no further seeds.
    """
    pairs = list(dict.fromkeys(pairs))
    in_parallel_kept(ledger, [Job(Task(*pair[:2], 0, pair[2]), None, prepared) for pair in pairs], jobs, "first seed")
    further = []
    for setting, contestant, condition in pairs:
        first = ledger.found(Task(setting, contestant, 0, condition))
        assert first is not None
        rivals = [
            ledger.found(Task(each, other, 0, same))
            for each, other, same in pairs
            if (each, same) == (setting, condition)
        ]
        best = max(found.goodput["sustained_rounds"] for found in rivals if found)
        if seeds > 1 and first.goodput["sustained_rounds"] >= race * best:
            further += [
                Job(Task(setting, contestant, seed, condition), first.goodput, prepared) for seed in range(1, seeds)
            ]
    in_parallel_kept(ledger, further, jobs, "further seeds")


def in_parallel_kept(ledger: Ledger, jobs: Sequence[Job], processes: int, label: str) -> None:
    """Do what is not in the ledger yet."""
    missing = {job.task.key: job for job in jobs if ledger.found(job.task) is None}
    bar = tqdm(total=len(missing), desc=label, file=sys.stderr, disable=None, leave=False)
    with bar:
        if processes == 1:
            for job in missing.values():
                ledger.keep(job.task, *do(job))
                bar.update()
            return
        with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
            futures = {pool.submit(do, job): job for job in missing.values()}
            try:
                for future in as_completed(futures):
                    ledger.keep(futures[future].task, *future.result())
                    bar.update()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def do(job: Job) -> tuple[Found, float]:
    """One task, and the seconds that it took."""
    begin_s = time.perf_counter()
    task = job.task
    table = str(job.prepared.table(task.setting)) if task.contestant.is_fitted else None
    if task.rates:
        points = {rate: _simulated(task, rate, table) for rate in task.rates}
        return Found({}, points), time.perf_counter() - begin_s
    fallback = job.prepared.reference_rate(task.setting)
    start = {name: (job.start or {}).get(name) or fallback for name in CRITERIA}
    step = _NEAR_STEP if job.start else 1.25
    found = find(task.setting, task.contestant, task.seed, start, step, task.condition, table)
    return found, time.perf_counter() - begin_s


def _simulated(task: Task, rate: float, table: str | None) -> Point:
    sessions, done = run(task.setting, task.contestant, rate, task.seed, task.condition, table)
    return measure(task.setting, sessions, done)
