"""Processes give all results, report errors, and end at any time with tasks that wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from ampd.errors import RunError
from planner.parallel import Processes, in_parallel


def work(item: Any) -> Any:
    if item == "fail":
        raise ValueError("no such item")
    if item == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "sleep":
        time.sleep(1000)
    return item, os.getpid()


def processes_of(pool: Processes) -> list[Any]:
    return list((pool._pool._processes or {}).values()) if pool._pool else []


def test_every_item_has_its_result_and_the_processes_stay() -> None:
    pool = Processes(work, 2)
    try:
        assert list(pool.results([], 60)) == []
        assert processes_of(pool) == []
        pids = set()
        for _ in range(2):
            done = dict(pool.results(range(10), 60))
            assert {item: result[0] for item, result in done.items()} == {item: item for item in range(10)}
            pids |= {result[1] for result in done.values()}
        assert pids <= {process.pid for process in processes_of(pool)}
        assert len(processes_of(pool)) == 2
    finally:
        pool.close()


def test_an_error_of_the_work_is_raised_here() -> None:
    pool = Processes(work, 1)
    try:
        with pytest.raises(ValueError, match="no such item"):
            list(pool.results(["fail"], 60))
    finally:
        pool.close()


def test_a_process_that_ends_is_an_error_in_one_line() -> None:
    pool = Processes(work, 2)
    try:
        with pytest.raises(RunError, match="a process of the simulation ended"):
            list(pool.results(["die"], 60))
    finally:
        pool.close()


def test_nothing_begins_after_the_time() -> None:
    pool = Processes(work, 1)
    try:
        with pytest.raises(TimeoutError):
            list(pool.results(["die"], 0.0))
        assert [item for item, _ in pool.results([1], 60)] == [1]
    finally:
        pool.close()


_KILLED = """
import os, signal
from planner.parallel import Processes
pool = Processes(os.path.abspath, 3)
assert len(list(pool.results("abc", 60))) == 3
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_processes_end_with_a_command_that_is_killed() -> None:
    command = subprocess.Popen([sys.executable, "-c", _KILLED], stdout=subprocess.PIPE)
    with command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"ready\n"
        command.kill()
        # Its processes have the other copies of the pipe, which ends with the last of them.
        assert command.stdout.read() == b""


def test_a_process_whose_parent_has_ended_meanwhile_ends() -> None:
    code = "import signal; from ampd.child_process import end_with_parent; end_with_parent(signal.SIGKILL, 1 << 22)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


def test_processes_end_while_they_work_and_many_tasks_wait() -> None:
    pool = Processes(work, 2)
    with pytest.raises(TimeoutError):
        list(pool.results(["sleep"] * 50, 0.3))
    ended = processes_of(pool)
    pool.close()
    assert len(ended) == 2
    assert [process.exitcode for process in ended] == [-signal.SIGKILL] * 2
    try:
        # They can begin again.
        assert [item for item, _ in pool.results([1], 60)] == [1]
    finally:
        pool.close()


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_items(jobs: int) -> None:
    found = in_parallel(square, range(9), "squares", jobs)
    assert [number for number, _ in found] == [number * number for number in range(9)]
    assert ({process for _, process in found} == {os.getpid()}) == (jobs == 1)


def test_one_item_needs_no_process() -> None:
    assert in_parallel(square, [3], "squares", 4) == [(9, os.getpid())]
    assert in_parallel(square, [], "squares", 4) == []
