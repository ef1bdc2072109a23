"""The part of SGLang that lives in the worker's own process: its tokenizer manager, with tasks and sockets."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterable
from contextlib import suppress
from threading import Thread
from typing import Any

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""How long the sockets may take to close before the next engine starts all the same."""


async def close_manager(engine: Any, manager: Any) -> None:
    """End that part. SGLang's own shutdown would kill all children of the worker."""
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
