"""The server imports once, its processes are as if they were started alone, and none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.fork_server import LOST_EXIT_CODE, ForkedProcess, ForkServer, ForkServerError
from tests.harness.process_ends import alive, wait_for

pytestmark = pytest.mark.slow

SHARED = "import os\nIMPORTED_BY = os.getpid()\n"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(1000)
"""


class Lab:
    """A folder of modules, and a server that imports some of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: ForkServer | None = None

    @contextmanager
    def serving(self, *modules: str, grace_s: float = 0.0) -> Iterator[ForkServer]:
        with ForkServer(modules, self.environment(), grace_s=grace_s) as self.server:
            yield self.server

    def environment(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder), *sys.path])
        return {**os.environ, "PYTHONPATH": path, **more}

    def start(self, code: str, flags: Sequence[str] = (), **environment: str) -> ForkedProcess:
        (self.folder / "job.py").write_text(code)
        assert self.server is not None
        return self.server.start(
            [sys.executable, "-m", "job", *flags], self.environment(**environment), self.folder / "job.log"
        )

    def output(self) -> str:
        return (self.folder / "job.log").read_text()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    (tmp_path / "shared.py").write_text(SHARED)
    (tmp_path / "job.py").write_text("")
    return Lab(tmp_path)


def test_a_process_is_as_if_it_were_started_alone_but_for_the_imports(lab: Lab) -> None:
    code = """
import os, sys, shared
print(shared.IMPORTED_BY == os.getppid(), sys.argv[1:], os.environ["COLOUR"], os.environ.get("ONLY_OURS"))
print(os.getsid(0) == os.getpgid(0) == os.getpid(), os.getcwd(), __name__)
print(open("/proc/self/cmdline").read().replace("\\0", " ").split()[1:3])
print("an error", file=sys.stderr)
sys.exit(7)
"""
    with lab.serving("shared") as server:
        process = lab.start(code, ["--flag", "value"], COLOUR="blue")
        assert process.wait(60) == 7
        assert process.poll() == 7
        assert server.pid != process.pid
    expected = ["True ['--flag', 'value'] blue None", f"True {Path.cwd()} __main__"]
    pytest.importorskip("setproctitle")
    assert lab.output().splitlines() == [*expected, "['-m', 'job']", "an error"]


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("import os; os.kill(os.getpid(), 9)", -9), ("raise ValueError('no such thing')", 1), ("", 0)],
)
def test_the_exit_code_is_that_of_the_process(lab: Lab, code: str, exit_code: int) -> None:
    with lab.serving():
        assert lab.start(code).wait(60) == exit_code
    assert ("ValueError: no such thing" in lab.output()) == (exit_code == 1)


def test_a_running_process_has_no_exit_code(lab: Lab) -> None:
    with lab.serving():
        process = lab.start(STUBBORN)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        process.send_signal(signal.SIGKILL)  # to nobody


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('there is a GPU')", "there is a GPU"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 threads"),
        ("import os; os._exit(3)", "it ended while it imported"),
    ],
)
def test_a_server_that_cannot_fork_safely_says_why(lab: Lab, code: str, reason: str) -> None:
    (lab.folder / "unsafe.py").write_text(code)
    with lab.serving("shared", "unsafe") as server:
        with pytest.raises(ForkServerError, match=reason):
            server.wait_ready()
        with pytest.raises(ForkServerError):
            lab.start("")


def test_threads_that_end_at_a_fork_are_no_obstacle(lab: Lab) -> None:
    """OpenBLAS, which numpy brings, starts one per core."""
    with lab.serving("numpy") as server:
        server.wait_ready()


def test_nothing_outlives_the_context(lab: Lab) -> None:
    with lab.serving():
        process = lab.start(STUBBORN)
        wait_for(lambda: "up" in lab.output())
    assert not alive(process.pid)


def test_a_process_may_end_by_itself_when_the_context_ends(lab: Lab) -> None:
    code = """
import signal, sys, time
def end(*_):
    print("ended", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(1000)
"""
    with lab.serving(grace_s=60.0):
        lab.start(code)
        wait_for(lambda: "up" in lab.output())
    assert lab.output().splitlines() == ["up", "ended"]


def test_a_context_that_ends_during_the_imports_does_not_wait_for_them(lab: Lab) -> None:
    (lab.folder / "endless.py").write_text("import time; print('importing', flush=True); time.sleep(1000)")
    output = lab.folder / "server.log"
    with output.open("wb") as log, ForkServer(["endless"], lab.environment(), log) as server:
        wait_for(lambda: "importing" in output.read_text())
    assert not alive(server.pid)


def test_processes_end_with_a_server_that_is_killed(lab: Lab) -> None:
    with lab.serving() as server:
        process = lab.start("import time; time.sleep(1000)")
        os.kill(server.pid, signal.SIGKILL)
        assert process.wait(60) == LOST_EXIT_CODE
        with pytest.raises(ForkServerError, match="has ended"):
            lab.start("")


def test_everything_ends_with_a_client_that_is_killed(lab: Lab) -> None:
    client = f"""
import os, sys, time
from pathlib import Path
from tests.harness.fork_server import ForkServer
server = ForkServer((), dict(os.environ), grace_s=0.0)
process = server.start([sys.executable, "-m", "job"], dict(os.environ), Path({str(lab.folder / "job.log")!r}))
print(server.pid, process.pid, flush=True)
time.sleep(1000)
"""
    (lab.folder / "job.py").write_text(STUBBORN)
    argv = [sys.executable, "-c", client]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=lab.environment()) as process:
        assert process.stdout is not None
        pids = [int(number) for number in process.stdout.readline().split()]
        wait_for(lambda: "up" in lab.output())
        process.kill()
        wait_for(lambda: not any(alive(pid) for pid in pids))
