"""The part of SGLang that lives in the worker's own process: its tokenizer manager, with tasks and sockets."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import Any


async def close_manager(engine: Any, manager: Any) -> None:
    """End that part. SGLang's own shutdown would kill all children of the worker."""
    import zmq

    if manager is None:
        return
    if getattr(manager, "_subprocess_watchdog", None) is not None:
        manager._subprocess_watchdog.stop()
    for task in list(manager.asyncio_tasks):
        task.cancel()
    await asyncio.gather(*manager.asyncio_tasks, return_exceptions=True)
    parts = [part for owner in (manager, engine) for part in vars(owner).values()]
    sockets = [part for part in parts if isinstance(part, zmq.Socket)]
    contexts = {socket.context for socket in sockets}
    for socket in sockets:
        socket.close(0)
    for context in contexts:
        context.destroy(0)
    engine.send_to_rpc = None


def ignore_quit() -> None:
    """SGLang's children send SIGQUIT to their parent when they fail, also while it starts or stops them."""
    with suppress(ValueError, RuntimeError):
        asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        signal.signal(signal.SIGQUIT, _ignore_signal)


def _ignore_signal(_number: int, _frame: object) -> None:
    """Do nothing. The children of SGLang inherit SIG_IGN, and no handler of Python's."""
