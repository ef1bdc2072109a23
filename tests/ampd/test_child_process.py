"""Children of a parent that is killed: they get a signal, and none starts without its parent."""

import subprocess
import sys

from ampd.child_process import tied_to_parent

CHILD = "trap 'echo ended; exit' TERM; echo ready; while :; do sleep 0.01; done"
PARENT = f"""
import subprocess, sys
from ampd.child_process import tied_to_parent
subprocess.Popen(tied_to_parent(["/bin/sh", "-c", {CHILD!r}]))
sys.stdin.read()
"""


def test_a_child_gets_sigterm_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        assert parent.stdout.readline() == "ended\n"


STOPPED = """
import signal, subprocess, sys
from ampd.child_process import tied_to_parent
with subprocess.Popen(tied_to_parent(["/bin/sh", "-c", "echo $$; kill -STOP $$"], signal.SIGKILL)) as child:
    child.wait()
"""


def test_sigkill_ends_a_child_that_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline()
        parent.kill()
        assert parent.stdout.read() == ""  # the child had it open


def test_a_child_whose_parent_has_gone_already_does_not_begin() -> None:
    command = tied_to_parent(["/bin/echo", "began"])
    # A shell between the two is the parent then.
    done = subprocess.run(["/bin/sh", "-c", '"$@"; exit $?', "sh", *command], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"began\n")


ENDLESS = """
import threading
from ampd.child_process import end_within
end_within(0.01)
threading.Thread(target=threading.Event().wait).start()
"""


def test_a_process_that_is_to_end_waits_for_nothing_for_ever() -> None:
    assert subprocess.run([sys.executable, "-c", ENDLESS], check=False).returncode == 1
