"""The server that forks engines does not outlive a process that is killed, whatever it imports meanwhile."""

import os
import select
import subprocess
import sys
from pathlib import Path

SERVER = """
from multiprocessing import forkserver, set_forkserver_preload
import sys
set_forkserver_preload(["tests.harness.ends_with_parent", "slow_import"])
forkserver.ensure_running()
sys.stdin.read()
"""

SLOW_IMPORT = """
import os, time
from pathlib import Path
with open(Path(__file__).with_name("pid"), "w") as pid:
    pid.write(str(os.getpid()))
time.sleep(3600)
"""


def test_a_server_that_imports_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text(SLOW_IMPORT)
    os.mkfifo(tmp_path / "pid")
    paths = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}"}
    argv = [sys.executable, "-c", SERVER]
    with subprocess.Popen(argv, env={**os.environ, **paths}, stdin=subprocess.PIPE) as parent:
        server = os.pidfd_open(int((tmp_path / "pid").read_text()))
        parent.kill()
    try:
        assert select.select([server], [], [], 60.0)[0], "the server still runs"
    finally:
        os.close(server)
