"""Python processes that start in a moment: a server imports the heavy modules once and forks a process per call.

A process that is started here runs `python -m MODULE FLAGS...` as the real command does, with its own environment,
output and process group. Only the imports are shared. The server has one thread, so forking it is safe. Only tests
start processes this way, never the product.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_PR_SET_PDEATHSIG = 1
_HEADER_BYTES = 8
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class ForkedProcess:
    """A process that the server started, with the part of `subprocess.Popen` that tests need."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        give_up_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if give_up_s is not None and time.monotonic() > give_up_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The server's process; it and all that it started end with the context.

    Args:
        modules: what it imports before the first fork.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.harness.fork_server", str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours
        self._lock = threading.Lock()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.wait(20)

    def start(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> ForkedProcess:
        """Run `python -m MODULE FLAGS...` in its own session.

        Args:
            argv: as for `subprocess.Popen`, beginning with this interpreter and `-m`.
            environment: the whole of it.
            output: a file, for standard output and error; or a terminal, which is its input, too.
        """
        assert list(argv[:2]) == [sys.executable, "-m"], argv
        request = {"argv": argv[2:], "environment": dict(environment), "folder": str(Path.cwd())}
        descriptor = os.open(output, os.O_RDWR | os.O_NOCTTY if output.is_char_device() else _NEW_FILE, 0o644)
        try:
            return ForkedProcess(self, self._call(request, [descriptor]))
        finally:
            os.close(descriptor)

    def exit_code(self, pid: int) -> int | None:
        """How a process ended, None while it runs; can be asked once for an end."""
        return self._call({"ended": pid})

    def _call(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._lock:
            body = json.dumps(request).encode()
            socket.send_fds(self._socket, [len(body).to_bytes(_HEADER_BYTES)], descriptors)
            self._socket.sendall(body)
            answer, _ = _receive(self._socket)
            return answer


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """One message and its descriptors.

    Raises:
        EOFError: the other side has gone.
    """
    header, descriptors, _, _ = socket.recv_fds(connection, _HEADER_BYTES, 1)
    size = int.from_bytes(header)
    body = b""
    while len(body) < size or len(header) < _HEADER_BYTES:
        if not header or not (part := connection.recv(size - len(body))):
            raise EOFError
        body += part
    return json.loads(body), descriptors


def _serve(connection: socket.socket) -> None:
    started: set[int] = set()
    with contextlib.suppress(EOFError):
        while True:
            request, descriptors = _receive(connection)
            if "ended" in request:
                pid, status = os.waitpid(request["ended"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
                started -= {pid}
            else:
                answer = os.fork()
                if answer == 0:
                    connection.close()
                    _become(request, descriptors[0])
                started.add(answer)
                os.close(descriptors[0])
            body = json.dumps(answer).encode()
            connection.sendall(len(body).to_bytes(_HEADER_BYTES) + body)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _become(request: dict[str, Any], output: int) -> None:
    """Be the process that was asked for; never returns."""
    code = 1
    try:
        os.setsid()
        _end_with_parent(signal.SIGTERM)
        os.chdir(request["folder"])
        if os.isatty(output):
            fcntl.ioctl(output, termios.TIOCSCTTY, 0)  # so that its Ctrl-C comes here
            os.dup2(output, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        # Those of the server belong to its own files: they know neither a terminal nor a pipe.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(request["environment"])
        module, *flags = request["argv"]
        sys.argv = [module, *flags]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    _end_with_parent(signal.SIGTERM)
    own_end, *module_names = sys.argv[1:]
    for module_name in module_names:
        importlib.import_module(module_name)
    # Dynamo reads the environment of its logs when it is imported; each process has its own.
    assert "dynamo._core" not in sys.modules
    _serve(socket.socket(fileno=int(own_end)))
