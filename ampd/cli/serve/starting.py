"""Starts the processes of a local graph. Workers with SGLang are forked from one process that has imported it.

SGLang's imports take most of the start of a graph. Each worker would repeat them, and twice more for its engine. They
are not shared where there are GPUs, because CUDA does not survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ampd.cli.serve.devices import GPUS_VARIABLE
from ampd.cli.serve.processes import ProcessSpec, Supervisor
from ampd.cli.serve.settings import EngineName
from ampd.fork_server import ForkServer, ForkServerError

_MODULE = "workers.engines.sglang_preload"
_LOG = "fork-server.log"
_GRACE_S = 30.0
"""Time that workers get to drain if this process is killed."""


@contextlib.contextmanager
def worker_server(
    engine: EngineName, environments: Sequence[Mapping[str, str]], log_dir: Path
) -> Iterator[ForkServer | None]:
    """The server that forks the workers; None: they are started as programs.

    Open it in a thread that lives as long as the graph: the kernel ends the server with that thread.

    Args:
        environments: the device environment of each worker.
    """
    on_gpus = any(GPUS_VARIABLE in environment for environment in environments)
    if engine is not EngineName.SGLANG or on_gpus:
        yield None
        return
    # Without GPUs the workers have the same devices. Libraries read them when they are imported.
    environment = {**os.environ, **environments[0]}
    with (log_dir / _LOG).open("wb") as output, ForkServer([_MODULE], environment, output, _GRACE_S) as server:
        yield server


async def start_processes(
    supervisor: Supervisor, server: ForkServer | None, specs: Sequence[ProcessSpec], progress: Callable[[str], None]
) -> None:
    """Start the workers by the server when it is ready, and all other processes at once.

    Args:
        specs: the workers are those whose module is `workers`.
        progress: gets a line if the server cannot serve. The workers are then programs of their own.
    """
    waiting = [spec for spec in specs if server is not None and spec.argv[2] == "workers"]
    for spec in specs:
        if spec not in waiting:
            supervisor.start(spec)
    if server is None:
        return
    try:
        await asyncio.to_thread(server.wait_ready)
    except ForkServerError as error:
        progress(f"each worker imports SGLang itself: {error}")
        server = None
    for spec in waiting:
        supervisor.start(spec, None if server is None else server.start)
