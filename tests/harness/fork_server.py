"""Python processes that start in a moment: a server imports heavy modules once, and forks a process per call.

A process that is started here runs `python -m MODULE FLAGS...` as the real command does, with its own environment,
output and process group. Only the imports are shared. The server must have one thread when it forks. It refuses to
serve if its imports started more.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ampd.child_process import end_with_parent, exit_now, tied_to_parent
from ampd.errors import one_line_of

_HEADER_BYTES = 8
_MOST_BYTES = 64 << 20
"""Of one message. The environment is most of it, and the kernel allows a few MB."""
_MODULE = 2
"""Place of the module in the command line of `python -m MODULE`."""
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_CLOSE_S = 20.0

LOST_EXIT_CODE = 255
"""Of a process that ended after its server had ended, as in Python's `multiprocessing`."""


class ForkServerError(Exception):
    """The server cannot start processes, in one line."""


class ForkedProcess:
    """A process that the server started, with the part of `subprocess.Popen` that a supervisor needs."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self._descriptor = os.pidfd_open(pid)  # valid, because the server waits for the process only when it is asked
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._ended_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._descriptor, select.POLLIN)
            if waiting.poll(None if timeout_s is None else 1000.0 * timeout_s):
                self.returncode = self._server.exit_code(self.pid)
                os.close(self._descriptor)
        return self.returncode


class ForkServer:
    """The server's process. It ends with the context, and what it has started ends before it.

    Args:
        modules: what it imports before the first fork. An exception in one of them is why it cannot serve.
        environment: the whole of it while it imports; None: ours.
        output: for its own messages; None: our standard error.
        grace_s: how long its processes may take to end when it ends, before they are killed.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
        grace_s: float = 0.0,
    ) -> None:
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-u", "-m", "tests.harness.fork_server", str(theirs.fileno()), str(grace_s), *modules]
        with theirs:
            self._process = subprocess.Popen(
                tied_to_parent(argv),
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._socket = ours
        self._lock = threading.Lock()
        self._grace_s = grace_s
        self._is_ready = False

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_ready:
            self._process.kill()  # it has started nothing, and would only look here after its imports
        with self._lock:
            self._socket.close()
        self._process.wait(self._grace_s + _CLOSE_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Return when it has imported its modules.

        Raises:
            ForkServerError: it cannot serve.
        """
        with self._lock:
            self._wait_ready()

    def start(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> ForkedProcess:
        """Run `python -m MODULE FLAGS...` in its own session. Waits until the server has imported its modules.

        Args:
            argv: as for `subprocess.Popen`, beginning with this interpreter and `-m`.
            environment: the whole of it.
            output: a file, for standard output and error; or a terminal, which is its input, too.

        Raises:
            ForkServerError: the server cannot serve.
        """
        assert list(argv[:2]) == [sys.executable, "-m"], argv
        request = {"argv": list(argv), "environment": dict(environment), "folder": str(Path.cwd())}
        descriptor = os.open(output, os.O_RDWR | os.O_NOCTTY if output.is_char_device() else _NEW_FILE, 0o644)
        try:
            return ForkedProcess(self, self._number(request, [descriptor]))
        except (OSError, OverflowError):
            raise ForkServerError(f"the fork server (process {self.pid}) names no process of its own") from None
        finally:
            os.close(descriptor)

    def exit_code(self, pid: int) -> int:
        """How a process ended that has ended; can be asked once."""
        try:
            return self._number({"ended": pid})
        except ForkServerError:
            return LOST_EXIT_CODE

    def _number(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> int:
        """The answer to a request: a process id or an exit code."""
        with self._lock:
            self._wait_ready()
            try:
                _send(self._socket, request, descriptors)
                answer = _receive(self._socket)[0]
            except (EOFError, OSError):
                raise ForkServerError(f"the fork server (process {self.pid}) has ended") from None
        if type(answer) is not int:
            raise ForkServerError(f"the fork server (process {self.pid}) answers {answer!r:.60}")
        return answer

    def _wait_ready(self) -> None:
        if self._is_ready:
            return
        try:
            error = _receive(self._socket)[0]
        except (EOFError, OSError):
            error = "it ended while it imported its modules"
        if error:
            raise ForkServerError(f"the fork server cannot serve: {error}")
        self._is_ready = True


def _send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    body = json.dumps(message).encode()
    socket.send_fds(connection, [len(body).to_bytes(_HEADER_BYTES)], descriptors)
    connection.sendall(body)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """One message and its descriptors.

    Raises:
        EOFError: the other side has gone.
        ConnectionError: what came is no message.
    """
    header, descriptors, _, _ = socket.recv_fds(connection, _HEADER_BYTES, 1)
    size = int.from_bytes(header)
    if size > _MOST_BYTES:
        raise ConnectionError(f"a message of {size} bytes")
    body = b""
    while len(body) < size or len(header) < _HEADER_BYTES:
        if not header or not (part := connection.recv(size - len(body))):
            raise EOFError
        body += part
    try:
        return json.loads(body), descriptors
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"a message that is not JSON: {error}") from None


def _checked(request: Any, descriptors: Sequence[int], started: Collection[int]) -> dict[str, Any]:
    """A request that can be served: the exit code of a process that was started, or the start of one.

    Raises:
        ConnectionError: it is another one.
    """
    match request:
        case {"ended": int(pid)} if pid in started:
            return dict(request)
        case {"argv": [_, "-m", *_] as argv, "environment": dict(variables), "folder": str(folder)} if (
            len(argv) > _MODULE and len(descriptors) == 1
        ):
            texts = [*argv, *variables.values(), folder]
            if all(isinstance(text, str) and "\0" not in text for text in texts) and all(variables):
                return dict(request)
    raise ConnectionError("a request of another form")


def surplus_threads() -> int:
    """Number of threads beside this one that a fork would break; 0: this process can be forked safely.

    OpenBLAS starts threads when it is imported, ends them before each fork and starts them again when it needs them. So
    threads count after a first fork.
    """
    if _threads() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return _threads() - 1


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _import(modules: Sequence[str]) -> str:
    """Import the modules; returns why the process cannot be forked afterwards, or nothing."""
    # Collections in the middle of imports find nothing. What is frozen is not written to by those of the children,
    # and stays shared.
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        traceback.print_exc()
        return one_line_of(error)
    if threads := surplus_threads():
        return f"its imports started {threads} threads"
    gc.freeze()
    return ""


def _serve(connection: socket.socket, grace_s: float) -> None:
    """Start processes until the other side has gone, or until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    started: set[int] = set()
    with contextlib.suppress(EOFError, ConnectionError, SystemExit):
        while True:
            received, descriptors = _receive(connection)
            request = _checked(received, descriptors, started)
            if "ended" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
                started -= {request["ended"]}
            else:
                parent = os.getpid()
                answer = os.fork()
                if answer == 0:
                    connection.close()
                    _become(request, descriptors[0], parent)
                started.add(answer)
                os.close(descriptors[0])
            _send(connection, answer)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end(started, grace_s)


def _end(started: set[int], grace_s: float) -> None:
    descriptors = [os.pidfd_open(pid) for pid in started]
    _signal_groups(started, signal.SIGTERM)
    give_up_s = time.monotonic() + grace_s
    for descriptor in descriptors:
        select.select([descriptor], [], [], max(0.0, give_up_s - time.monotonic()))
    _signal_groups(started, signal.SIGKILL)


def _signal_groups(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


def _become(request: dict[str, Any], output: int, parent: int) -> None:
    """Be the process that was asked for; never returns."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        os.chdir(request["folder"])
        _take_over(output)
        os.environ.clear()
        os.environ.update(request["environment"])
        _, _, module, *flags = request["argv"]
        _set_title(request["argv"])
        sys.argv = [module, *flags]
        gc.enable()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    exit_now(code)


def _take_over(output: int) -> None:
    """Make it standard output and error; if it is a terminal, the input, too."""
    if os.isatty(output):
        import fcntl
        import termios

        fcntl.ioctl(output, termios.TIOCSCTTY, 0)  # so that its Ctrl-C comes here
        os.dup2(output, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # Those of the server belong to its own files: they know neither a terminal nor a pipe.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


def _set_title(argv: Sequence[str]) -> None:
    """Show the command line in `ps`, where SGLang's package for that is installed.

    The first call of a process must come before its environment changes: the package finds the place by it.
    """
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(" ".join(argv))


if __name__ == "__main__":
    own_end, grace, *module_names = sys.argv[1:]
    own = socket.socket(fileno=int(own_end))
    _set_title(sys.orig_argv)
    reason = _import(module_names)
    with contextlib.suppress(ConnectionError):
        _send(own, reason)
        if not reason:
            _serve(own, float(grace))
