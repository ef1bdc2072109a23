"""SGLang's own processes, and its part of the worker's process: how they start and end, and who notices."""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import signal
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

from ampd.child_process import reserved_ports
from workers.engines.sglang_plugin import ENGINE_FLAG

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""How long the sockets may take to close before the next engine starts all the same."""

# SGLang's processes end with the thread that started them, so this one lives as long as the worker.
_launcher = ThreadPoolExecutor(1, "sglang-launch")


class SglangProcesses:
    """The processes of one start of SGLang.

    Attributes:
        engine: SGLang's `Engine`, with its requests; None: it has not started.
        manager: its tokenizer manager, with tasks and sockets in the worker's process. It is there also if the engine
            then fails to start.
        lost: done, with one line, when SGLang cannot serve any more.
    """

    def __init__(self) -> None:
        self.engine: Any = None
        self.manager: Any = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.children: list[BaseProcess] = []

    async def start(self, arguments: dict[str, Any]) -> None:
        """Start them, which takes seconds, or minutes with a large model.

        Args:
            arguments: of SGLang's `Engine`.
        """
        ignore_quit()
        launch = asyncio.get_running_loop().run_in_executor(_launcher, self._launch, arguments)
        try:
            await asyncio.shield(launch)
        except asyncio.CancelledError:
            await asyncio.wait({launch})  # nothing of it may begin later
            launch.exception()
            raise
        finally:
            for process in self.children:
                asyncio.get_running_loop().add_reader(process.sentinel, self._process_ended, process)

    def _launch(self, arguments: dict[str, Any]) -> None:
        os.environ[ENGINE_FLAG] = "1"
        _add_scripts_to_path()
        from sglang.srt.entrypoints.engine import Engine

        def init_manager(*args: Any, **kwargs: Any) -> Any:
            made = Engine.init_tokenizer_manager_func(*args, **kwargs)
            self.manager = made[0]
            return made

        # It reports every handler that is not its own as an error.
        logging.getLogger("sglang.srt.entrypoints.engine").addFilter(lambda record: "SIGQUIT" not in str(record.msg))
        kind: Any = type("OurEngine", (Engine,), {"init_tokenizer_manager_func": staticmethod(init_manager)})
        before = set(multiprocessing.active_children())
        # SGLang wants a loop on the thread that starts it, and uses none there.
        unused = asyncio.new_event_loop()
        asyncio.set_event_loop(unused)
        try:
            # Allocated first: what an engine that fails to start has opened must be closed as well.
            self.engine = kind.__new__(kind)
            # SGLang would choose a free port itself, which others could take until the first rank listens there.
            with reserved_ports("127.0.0.1", 1) as (port,):
                self.engine.__init__(**{"nccl_port": port, **arguments})
        finally:
            self.children = [child for child in multiprocessing.active_children() if child not in before]
            asyncio.set_event_loop(None)
            unused.close()

    def _process_ended(self, process: BaseProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        self._lose(f"SGLang's process {process.name} ended by itself (exit code {process.exitcode})")

    def _lose(self, line: str) -> None:
        if not self.lost.done():
            self.lost.set_result(line)

    def take_signals_back(self) -> None:
        """SGLang installs handlers that end the whole process; the worker decides that itself."""
        loop = asyncio.get_running_loop()
        with suppress(ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGTERM)
            # A child that fails, and SGLang's watchdog of a child that hangs, signal before the child ends, if ever.
            loop.add_signal_handler(signal.SIGQUIT, self._lose, "SGLang reports that one of its processes failed")

    async def end_here(self) -> None:
        """End SGLang's part of this process, before its children and what they share with it."""
        self.lost.cancel()
        for process in self.children:
            with suppress(ValueError):
                asyncio.get_running_loop().remove_reader(process.sentinel)
        engine, self.engine = self.engine, None
        if engine is not None:
            atexit.unregister(engine.shutdown)
            await close_manager(engine, self.manager)
            self.manager = None
            ignore_quit()

    async def end_children(self, grace_s: float) -> None:
        """End the processes, by force after `grace_s` seconds each."""
        children, self.children = self.children, []
        for process in children:
            process.terminate()
        for process in children:
            await asyncio.to_thread(process.join, grace_s)
            process.kill()
            # A process that a driver holds ends late. The worker goes on answering meanwhile.
            await asyncio.to_thread(process.join)
            process.close()


async def close_manager(engine: Any, manager: Any) -> None:
    """End the tokenizer manager of an engine. SGLang's own shutdown would kill all children of the worker."""
    import zmq

    if manager is None:
        return
    if (watchdog := getattr(manager, "_subprocess_watchdog", None)) is not None:
        await asyncio.to_thread(watchdog.stop)  # it waits for its thread
    for task in list(manager.asyncio_tasks):
        task.cancel()
    await asyncio.gather(*manager.asyncio_tasks, return_exceptions=True)
    parts = [part for owner in (manager, engine) for part in vars(owner).values()]
    sockets = [part for part in parts if isinstance(part, zmq.Socket)]
    contexts = {socket.context for socket in sockets}
    for socket in sockets:
        socket.close(0)
    await _destroyed(contexts)
    engine.send_to_rpc = None


async def _destroyed(contexts: Iterable[Any]) -> None:
    """ZeroMQ waits without a bound for the sockets of a context. So a thread does, and the worker goes on answering."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def destroy() -> None:
        try:
            for context in contexts:
                context.destroy(0)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set)

    Thread(target=destroy, name="ampd-sglang-close", daemon=True).start()
    try:
        async with asyncio.timeout(CLOSE_S):
            await done.wait()
    except TimeoutError:
        log.warning("SGLang's sockets did not close within %g s", CLOSE_S)


def ignore_quit() -> None:
    """SGLang's children send SIGQUIT to their parent when they fail, also while it starts or stops them."""
    with suppress(ValueError, RuntimeError):
        asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        signal.signal(signal.SIGQUIT, _ignore_signal)


def _ignore_signal(_number: int, _frame: object) -> None:
    """Do nothing. The children of SGLang inherit SIG_IGN, and no handler of Python's."""


def _add_scripts_to_path() -> None:
    """Let SGLang find `ninja`, which it compiles with, also where the virtual environment is not activated."""
    scripts, folders = sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath).split(os.pathsep)
    if scripts not in folders:
        os.environ["PATH"] = os.pathsep.join([*folders, scripts])
