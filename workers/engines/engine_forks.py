"""SGLang's own processes, forked from one that has imported SGLang.

SGLang spawns its schedulers and its detokenizer, and each of them would import SGLang again, which is most of a start.
The worker cannot fork them, because it has threads by then. So it forks a server while it has one thread, at its own
start, and this server forks them: Python's fork server for `multiprocessing`, which Python itself would only start as a
new program that imports everything.

Engines on GPUs are left out, because CUDA does not survive a fork and SGLang's imports may use it.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from ampd.child_process import end_with_parent

log = logging.getLogger(__name__)

_IMPORTS = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "workers.kv.ranks.linker",
)
"""What SGLang's processes import. The registry imports all models, as a scheduler does. NIXL and Dynamo are left out:
they set themselves up when they are loaded, each in its own process."""

_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)
"""SGLang raises them in the worker before it starts its processes."""


def prepare() -> None:
    """Import SGLang and fork the server, or leave all to the start of the engine if there is a GPU or no SGLang."""
    try:
        _import_sglang()
    except Exception as error:  # of any library; what matters comes again at the start of the engine
        log.info("SGLang's processes are spawned, not forked: %s", error)
    else:
        start_server()


def _import_sglang() -> None:
    import torch

    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU, and CUDA does not survive a fork")
    for module in _IMPORTS:
        importlib.import_module(module)


def start_server() -> bool:
    """Fork the server of this process; it ends with it. SGLang should be imported already.

    Returns:
        Whether there is one. There is none if this process has threads that a fork would break.
    """
    if threads := surplus_threads():
        log.warning("SGLang's processes are spawned, not forked: there are %d more threads", threads)
        return False
    sys.stdout.flush()
    sys.stderr.flush()
    listener, address = _private_socket()
    alive_read, alive_write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(alive_write)
        os.close(address)
        _serve(listener, alive_read, parent)
    listener.close()
    os.close(alive_read)
    # What `multiprocessing.forkserver.ensure_running` sets after it has started a server.
    server: Any = forkserver._forkserver
    server._forkserver_address = f"/proc/self/fd/{address}"
    server._forkserver_alive_fd = alive_write
    server._forkserver_pid = pid
    return True


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


def choose_start_method() -> None:
    """Let `multiprocessing` fork the next processes if the server runs, else spawn them."""
    server: Any = forkserver._forkserver
    is_running = False
    if server._forkserver_pid is not None:
        with suppress(ChildProcessError):
            is_running = not os.waitpid(server._forkserver_pid, os.WNOHANG)[0]
    multiprocessing.set_start_method("forkserver" if is_running else "spawn", force=True)


class AsHere:
    """Calls a function in another process, with the environment and limits of this one when it was sent there.

    A process that is spawned has them anyway. A forked one has those of the server.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Any, ...]:
        limits = {limit: resource.getrlimit(limit) for limit in _LIMITS}
        return _Sent, (self._function, dict(os.environ), limits)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(*args, **options)


class _Sent:
    def __init__(
        self, function: Callable[..., Any], environment: dict[str, str], limits: dict[int, tuple[int, int]]
    ) -> None:
        self._function = function
        self._environment = environment
        self._limits = limits

    def __call__(self, *args: Any, **options: Any) -> Any:
        end_with_parent(signal.SIGKILL)  # as SGLang's processes do themselves, but later
        for number in (signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(self._environment)
        for limit, values in self._limits.items():
            with suppress(ValueError, OSError):
                resource.setrlimit(limit, values)
        return self._function(*args, **options)


def _private_socket() -> tuple[socket.socket, int]:
    """A socket that listens, and the descriptor by whose path in /proc only this process can connect to it."""
    listener = socket.socket(socket.AF_UNIX)
    with tempfile.TemporaryDirectory(prefix="ampd-engine-") as folder:
        path = Path(folder) / "socket"
        listener.bind(str(path))
        listener.listen()
        return listener, os.open(path, os.O_PATH)


def _serve(listener: socket.socket, alive: int, parent: int) -> None:
    """Be the server; never returns."""
    try:
        end_with_parent(signal.SIGKILL)
        if os.getppid() == parent:
            # A supervisor signals the group of the worker, and the worker ends this server when it has drained.
            signal.signal(signal.SIGTERM, lambda *_: None)
            # SGLang's processes tell their parent so when they fail.
            signal.signal(signal.SIGQUIT, lambda *_: os.kill(parent, signal.SIGQUIT))
            forkserver.main(listener.detach(), alive, [])
    finally:
        os._exit(0)
