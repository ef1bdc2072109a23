"""SGLang engines that start in seconds: a server imports SGLang once and forks their processes.

SGLang spawns its scheduler and its detokenizer, and each of them imports SGLang again, which takes most of a minute.
While `forked_engines` is open, Python's own fork server starts them instead. There is no CUDA in these tests, so a fork
after the imports is safe. An engine may have several ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from tests.harness import cpu_ranks
from workers.engines.sglang_plugin import ENGINE_FLAG

DEVICE = os.environ.get("AMPD_TEST_DEVICE", "cpu")
"""Where the engines of a pair compute: `cpu` or `cuda`."""

_PRELOADED = (
    "tests.harness.ends_with_parent",
    "tests.harness.forked_engines",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "workers.kv.ranks.linker",
    "workers.kv.nixl_transport",
)


SERVER_ENVIRONMENT = {
    ENGINE_FLAG: "1",
    "CUDA_VISIBLE_DEVICES": "",
    # The ranks of an engine compare their decisions, and the engine ends at the first difference.
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
}
"""The server reads these at its imports, as an engine would that imports SGLang itself."""


@contextmanager
def forked_engines() -> Iterator[None]:
    """Start the server and let it fork what SGLang spawns; the server ends with the test process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SERVER_ENVIRONMENT.items():
            patch.setenv(name, value)
        start_server()
        patch.setattr(multiprocessing.Process, "_Popen", staticmethod(fork))
        # SGLang asks for "spawn" before each start.
        patch.setattr(multiprocessing, "set_start_method", lambda *_args, **_options: None)
        yield


def start_server(further_modules: Sequence[str] = ()) -> None:
    """Start the server with the environment of this process. It imports further modules beside SGLang's own."""
    multiprocessing.set_forkserver_preload([*_PRELOADED, *further_modules])
    # A scheduler that fails to start sends SIGQUIT to its parent, which is the server now.
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGQUIT, before)


def fork(process: BaseProcess) -> popen_forkserver.Popen:
    """Start a process by the server, with the environment of this one."""
    started: Any = process
    started._target, started._args = _with_environment, (dict(os.environ), started._target, *started._args)
    return popen_forkserver.Popen(process)


def _with_environment(environment: dict[str, str], target: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Run in the forked process, which has the environment of the server."""
    os.environ.clear()
    os.environ.update(environment)
    if threads := environment.get("OMP_NUM_THREADS"):  # torch has read the server's
        torch.set_num_threads(int(threads))
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    cpu_ranks.register()
    target(*args, **options)
    os._exit(1)  # SGLang has written the exception, and its threads may keep the process from ending
