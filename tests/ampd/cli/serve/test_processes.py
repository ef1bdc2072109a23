import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ampd.cli.serve.processes import ProcessSpec, Supervisor, last_line, python_module
from tests.harness.process_ends import alive, wait_for


def _python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_an_ended_process_is_reported_with_its_code_and_last_line(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    supervisor.start(ProcessSpec("short", _python("print('why'); print(); raise SystemExit(3)")))
    wait_for(lambda: supervisor.ended())
    assert supervisor.ended()["short"].startswith("short ended with exit code 3: why (log: ")
    supervisor.stop()


def test_what_is_hidden_from_a_process_is_not_in_its_environment() -> None:
    spec = ProcessSpec("frontend", (), {"SHOWN": "1"}, hides="SECRET_")
    assert spec.environment({"SECRET_URL": "x", "PATH": "/bin"}) == {"PATH": "/bin", "SHOWN": "1"}
    assert ProcessSpec("worker", ()).environment({"SECRET_URL": "x"}) == {"SECRET_URL": "x"}


def test_a_process_starts_again_with_a_log_of_its_own(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    supervisor.start(ProcessSpec("short", _python("print('why')")))
    for log in ("short.log", "short.2.log", "short.3.log"):
        wait_for(supervisor.ended)
        assert supervisor.ended() == {"short": f"short ended with exit code 0: why (log: {tmp_path / log})"}
        supervisor.start_again("short")
    supervisor.stop()


def test_stop_ends_processes_that_ignore_sigterm_and_their_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"
    stubborn = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {child}; time.sleep(1000)"
    supervisor = Supervisor(tmp_path)
    supervisor.start(ProcessSpec("stubborn", _python(stubborn)))
    log = tmp_path / "stubborn.log"
    wait_for(lambda: log.read_text().strip())
    grandchild = int(log.read_text())
    supervisor.stop(grace_s=0.2)
    wait_for(lambda: not alive(grandchild))


STUBBORN = _python("import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)")


def test_only_the_wanted_processes_are_stopped(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    for name in ("coordinator-0", "worker-0"):
        supervisor.start(ProcessSpec(name, (str(shutil.which("sleep")), "1000")))
    pids = {child.spec.name: child.process.pid for child in supervisor._children}
    supervisor.stop(wanted=lambda name: name.startswith("coordinator"))
    assert [alive(pids[name]) for name in ("coordinator-0", "worker-0")] == [False, True]
    supervisor.stop()
    assert not alive(pids["worker-0"])


def test_kill_ends_a_stop_that_waits(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    supervisor.start(ProcessSpec("stubborn", STUBBORN))
    wait_for(lambda: "up" in (tmp_path / "stubborn.log").read_text())
    stopping = threading.Thread(target=supervisor.stop, args=(1000.0,), daemon=True)
    stopping.start()
    supervisor.kill()
    stopping.join(60)
    assert not stopping.is_alive()


def test_the_environment_is_added_to_the_parents(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    supervisor.start(ProcessSpec("env", _python("import os; print(os.environ['X'], 'PATH' in os.environ)"), {"X": "1"}))
    wait_for(lambda: supervisor.ended())
    assert last_line(tmp_path / "env.log") == "1 True"
    supervisor.stop()


@pytest.mark.parametrize("hangs", [False, True])
def test_children_end_when_their_supervisor_is_killed(tmp_path: Path, hangs: bool) -> None:
    parent = (
        "import sys, time\nfrom pathlib import Path\n"
        "from ampd.cli.serve.processes import ProcessSpec, Supervisor\n"
        f"s = Supervisor(Path({str(tmp_path)!r}))\n"
        f"s.start(ProcessSpec('child', ({shutil.which('sleep')!r}, '1000')))\n"
        "print(s._children[0].process.pid, flush=True)\ntime.sleep(1000)\n"
    )
    with subprocess.Popen(_python(parent), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        wait_for(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n")
        if hangs:
            os.kill(child, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not alive(child))


def test_python_module_uses_this_interpreter() -> None:
    assert python_module("workers", ["--role", "decode"]) == (sys.executable, "-m", "workers", "--role", "decode")
