"""The harness inside a worker with SGLang: its figures, and faults of its KV reads and of SGLang's scheduler."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.faults.inside import ARMED, DEADLY_PROMPT, KV_COPY_FAILS, KV_FAILS, SOCKET_VARIABLE, session_figures
from tests.harness.forked_engines import fork

WATCHDOG_S = 6.0
"""How long an engine may stand still here. Real workers wait a minute."""

RESTART_WINDOW_S = 60.0
"""An engine that is lost more than three times within this time stays lost. In real workers it is ten minutes, in which
the harness breaks more engines."""

FORGET_S = 60.0
"""A worker from which nothing was read for this long is forgotten. Real workers forget it after ten minutes."""

RAISES, HANGS = "raises", "hangs"


def engine_fault_file(control: Path) -> Path:
    """Where the next fault of a worker's scheduler is written: `RAISES` or `HANGS`. It strikes once."""
    return control.with_suffix(".engine")


def install_engines() -> None:
    """Let the engines' server fork SGLang's processes."""
    faults = engine_fault_file(Path(os.environ[SOCKET_VARIABLE]))

    def start(process: BaseProcess) -> Any:
        started: Any = process
        started._target, started._args = _in_engine, (str(faults), started._target, *started._args)
        return fork(process)

    server: Any = forkserver._forkserver
    server.ensure_running = lambda: None  # it runs, but not as a child of this process
    patched: Any = multiprocessing
    patched.Process._Popen = staticmethod(start)
    patched.set_start_method = lambda *_args, **_options: None


def _in_engine(faults: str, target: Callable[..., Any], *args: Any) -> None:
    """Run in each of SGLang's processes."""
    log = os.open(Path(faults).with_suffix(".engine-log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    threading.Thread(target=_end_with_worker, daemon=True).start()
    _install_scheduler(Path(faults))
    target(*args)


def _end_with_worker() -> None:
    """The parent of this process is the engines' server, which lives on."""
    worker: Any = multiprocessing.parent_process()
    connection.wait([worker.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _install_scheduler(faults: Path) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    run_batch = Scheduler.run_batch

    def run_faulty(scheduler: Any, batch: Any, *args: Any, **options: Any) -> Any:
        if any(list(request.origin_input_ids[: len(DEADLY_PROMPT)]) == DEADLY_PROMPT for request in batch.reqs):
            os.kill(os.getpid(), signal.SIGKILL)
        if faults.exists():
            fault = faults.read_text()
            faults.unlink()  # the engine that starts next is whole
            if fault == RAISES:
                raise ZeroDivisionError("injected")
            while True:
                time.sleep(1.0)
        return run_batch(scheduler, batch, *args, **options)

    Scheduler.run_batch = run_faulty


def install_kv() -> None:
    """Refused leases, reads that break off, and workers that are soon forgotten."""
    from workers.kv import shared
    from workers.kv.exchange import KvExchange
    from workers.kv.nixl_transport import NixlTransport
    from workers.kv.peer_reads import Remote

    serve, read, begin = KvExchange.serve, NixlTransport.read, NixlTransport.__init__

    async def serve_faulty(exchange: KvExchange[Any], request: Any) -> Any:
        if request["op"] == "lease" and ARMED.strikes(KV_FAILS):
            return {"error": "injected"}
        return await serve(exchange, request)

    def read_faulty(
        transport: NixlTransport,
        remote: Remote,
        theirs: Sequence[tuple[int, int]],
        ours: Sequence[tuple[int, int]],
    ) -> tuple[Future[int], Callable[[], None]]:
        if not ARMED.strikes(KV_COPY_FAILS):
            return read(transport, remote, theirs, ours)
        # Half of it is read: what came must not be used.
        begun, give_up = read(transport, remote, theirs[: len(theirs) // 2], ours[: len(ours) // 2])
        broken: Future[int] = Future()
        begun.add_done_callback(lambda _: broken.set_exception(ConnectionError("injected")))
        return broken, give_up

    def begin_forgetful(transport: NixlTransport, address: int, size_bytes: int) -> None:
        begin(transport, address, size_bytes, FORGET_S)

    # All KV goes over NIXL, whose reads break off.
    setattr(shared, "this_host", lambda: "")  # noqa: B010
    patched: Any = KvExchange, NixlTransport
    patched[0].serve, patched[1].read, patched[1].__init__ = serve_faulty, read_faulty, begin_forgetful


def figures(worker: Any) -> dict[str, Any]:
    """What must be zero when no round is in progress; the sessions that are held; SGLang's processes."""
    engine, rounds = worker._engine._engine, worker._rounds
    directory, transport = engine.kv.store.directory, engine.kv._transport
    directory.collect(time.monotonic())
    return {
        "rounds": rounds.running,
        "told rounds": sum(len(link.running) for link in worker._answering._ends._links.values()),
        "ended sessions": len(worker._answering._sessions),
        "queued": len(rounds._queue),
        "engine requests": len(engine._running),
        "protected requests": len(directory._requests),
        "page leases": len(directory._leases),
        "writers": len(directory._writers),
        "session tokens": directory.session_tokens,
        **session_figures(rounds._sessions),
        "store tokens": directory.figures.used_tokens,
        "NIXL peers": len(transport._remotes) + len(transport._leaving),
        "NIXL reads": len(transport._active),
        "engine processes": [process.pid for process in engine._sglang.children],
    }
