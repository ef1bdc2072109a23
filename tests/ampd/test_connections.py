"""Connections whose packets the network drops silently end, whoever opened them."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ampd import connections
from ampd.connections import SILENCE_S
from tests.harness.connections import drop_packets
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

_PROGRAM = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    while not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        pass
    print("bound", flush=True)
    try:
        connection.recv(1)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def test_a_silent_connection_of_another_module_is_broken(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as server:
        argv = [sys.executable, "-m", connections.__name__, "program", str(server.getsockname()[1])]
        environment = {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}
        with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            accepted, _ = server.accept()
            with accepted:
                assert process.stdout.readline() == "bound\n"
                drop_packets(accepted)
                assert process.stdout.readline() == "Connection timed out\n"
                assert process.wait(PATIENCE_S) == 0
    assert SILENCE_S < 15, "a stream that is silent for so long is given up"
