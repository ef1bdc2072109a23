"""Processes of `multiprocessing` come from a server that was forked before its parent had threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.harness.process_ends import alive, wait_for

pytestmark = pytest.mark.slow

WORKER = """
import multiprocessing, os, resource, signal, sys, threading, time
from workers.engines.engine_forks import AsHere, choose_start_method, start_server

IMPORTED_BY = os.getpid()

def report(results):
    import __main__
    results.send({
        "imported by": __main__.IMPORTED_BY,
        "parent": os.getppid(),
        "colour": os.environ.get("COLOUR"),
        "stack": resource.getrlimit(resource.RLIMIT_STACK)[0],
        "default signals": [signal.getsignal(n) is signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGQUIT)],
        "method": multiprocessing.get_start_method(),
    })

def fail(results):
    os.kill(os.getppid(), signal.SIGQUIT)

def sleep(results):
    results.send(os.getpid())
    time.sleep(1000)

def started(target):
    multiprocessing.set_start_method("spawn", force=True)  # as SGLang does
    choose_start_method()
    theirs, ours = multiprocessing.Pipe()
    process = multiprocessing.Process(target=AsHere(target), args=(ours,))
    process.start()
    ours.close()
    return process, theirs
"""


@contextmanager
def worker(folder: Path, code: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A process with the code of a worker, and what it prints."""
    script = folder / "worker.py"
    body = "\n".join(f"    {line}" for line in code.strip().splitlines())
    script.write_text(f"{WORKER}\nif __name__ == '__main__':\n{body}\n")
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout
        finally:
            process.kill()


def lines(folder: Path, code: str) -> list[str]:
    with worker(folder, code) as (process, output):
        text = output.read()
        assert process.wait(120) == 0, text
        return text.splitlines()


def test_a_forked_process_has_the_environment_and_limits_of_its_starter_and_imports_nothing_again(
    tmp_path: Path,
) -> None:
    code = """
assert start_server()
threading.Thread(target=time.sleep, args=(0.01,)).start()
os.environ["COLOUR"] = "blue"
soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, hard))
process, results = started(report)
found = results.recv()
process.join()
assert found["parent"] not in (os.getpid(), os.getppid()), "the server is in between"
print(found["imported by"] == os.getpid(), found["colour"], found["stack"], found["default signals"], found["method"])
print(process.exitcode)
"""
    assert lines(tmp_path, code) == [f"True blue {1 << 22} [True, True] forkserver", "0"]
    assert not [entry for entry in tmp_path.iterdir() if entry.name != "worker.py"], "no socket is left"


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="no server"),
        pytest.param(
            "thread = threading.Thread(target=time.sleep, args=(1.0,)); thread.start(); assert not start_server()",
            id="threads",
        ),
        pytest.param(
            "start_server(); from multiprocessing import forkserver as f; "
            "os.kill(f._forkserver._forkserver_pid, 9); os.waitid(os.P_PID, f._forkserver._forkserver_pid, "
            "os.WEXITED | os.WNOWAIT)",
            id="the server was killed",
        ),
    ],
)
def test_without_a_server_processes_are_spawned(tmp_path: Path, before: str) -> None:
    code = f"""
{before}
process, results = started(report)
found = results.recv()
process.join()
print(found["parent"] == os.getpid(), found["method"], process.exitcode)
"""
    assert lines(tmp_path, code) == ["True spawn 0"]


def test_a_process_that_fails_tells_the_worker(tmp_path: Path) -> None:
    code = """
start_server()
signal.signal(signal.SIGQUIT, lambda *_: print("told", flush=True))
process, _ = started(fail)
process.join()
print(process.exitcode)
time.sleep(1000)
"""
    with worker(tmp_path, code) as (_, output):
        assert sorted([output.readline(), output.readline()]) == ["0\n", "told\n"]


def test_the_server_outlives_a_signal_to_the_group(tmp_path: Path) -> None:
    """A supervisor ends a worker by a signal to its group, and the worker drains first."""
    code = """
start_server()
signal.signal(signal.SIGTERM, lambda *_: None)
process, results = started(sleep)
print(results.recv(), flush=True)
process.join()
print(process.exitcode, flush=True)
process, results = started(report)
print(results.recv()["method"], flush=True)
"""
    with worker(tmp_path, code) as (process, output):
        output.readline()
        os.killpg(process.pid, signal.SIGTERM)
        assert [output.readline(), output.readline()] == [f"{-signal.SIGTERM}\n", "forkserver\n"]


def test_nothing_outlives_the_worker(tmp_path: Path) -> None:
    code = """
start_server()
process, results = started(sleep)
from multiprocessing import forkserver
print(forkserver._forkserver._forkserver_pid, results.recv(), flush=True)
time.sleep(1000)
"""
    with worker(tmp_path, code) as (process, output):
        pids = [int(number) for number in output.readline().split()]
        process.kill()
        wait_for(lambda: not any(alive(pid) for pid in pids))
