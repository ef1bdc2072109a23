"""`python -m workers` with the harness inside: its debug view, and faults of KV reads, publications and the engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ampd.background_tasks import SupervisedTask
from ampd.child_process import exit_now
from ampd.types import WorkerView
from benchmarks.faults.clock import install_clock
from benchmarks.faults.inside import (
    ARMED,
    DEADLY_PROMPT,
    ENGINE_BREAKS,
    ENGINE_HANGS,
    KV_COPY_FAILS,
    KV_FAILS,
    KV_LIES,
    KV_STALLS,
    LEAKS_PROTECTION,
    NONSENSE,
    REPEATS_TOKENS,
    fail_on_demand,
    open_control,
    session_figures,
)

WATCHDOG_S = 2.0
"""How long an engine may stand still here. Real workers wait a minute."""

READ_FLOOR_S = 0.2
"""The shortest time after which a read of KV is given up here. It is a fifth of the longest, as in real workers."""


def install() -> None:
    """Put the faults into the modules of the worker, before its process starts."""
    from ampd.serving import kv_tiers
    from workers.engines import supervised

    install_tasks()
    install_clock()
    _install_publications()
    if "sglang" in sys.argv:
        from benchmarks.faults import sglang_worker

        supervised.STALL_FLOOR_S = sglang_worker.WATCHDOG_S
        supervised.RESTART_WINDOW_S = sglang_worker.RESTART_WINDOW_S
        sglang_worker.install_engines()
        sglang_worker.install_kv()
        _install_control(sglang_worker.figures)
    else:
        supervised.STALL_FLOOR_S = WATCHDOG_S
        kv_tiers.READ_FLOOR_S = READ_FLOOR_S
        _install_kv()
        _install_engine()
        _install_control(figures)


def _install_control(figures: Callable[[Any], dict[str, Any]]) -> None:
    from workers.component import Worker

    run = Worker.run

    async def controlled(worker: Worker) -> None:
        server = await open_control(lambda: figures(worker))
        try:
            await run(worker)
        finally:
            server.close()

    Worker.run = controlled


def figures(worker: Any) -> dict[str, Any]:
    """What must be zero when no round is in progress, and the sessions that are held."""
    engine, directory, rounds = worker._engine._engine, worker._engine.kv.store.directory, worker._rounds
    directory.collect(time.monotonic())
    return {
        "rounds": rounds.running,
        "told rounds": sum(len(link.running) for link in worker._answering._ends._links.values()),
        "ended sessions": len(worker._answering._sessions),
        "queued": len(rounds._queue),
        "engine requests": len(engine._requests.alive),
        "protected requests": len(directory._requests),
        "page leases": len(directory._leases),
        "writers": len(directory._writers),
        "session tokens": directory.session_tokens,
        **session_figures(rounds._sessions),
        "store tokens": directory.figures.used_tokens,
    }


def install_tasks() -> None:
    begin = SupervisedTask.__init__

    def failing(task: SupervisedTask, name: str, work: Any, *args: Any, **options: Any) -> None:
        begin(task, name, fail_on_demand(work), *args, **options)

    SupervisedTask.__init__ = failing


def _install_kv() -> None:
    from workers.kv.exchange import KvExchange
    from workers.kv.peer_reads import PeerReads

    serve, finished = KvExchange.serve, PeerReads._finished

    async def serve_faulty(exchange: KvExchange[Any], request: Any) -> Any:
        if request["op"] == "lease":
            if ARMED.strikes(LEAKS_PROTECTION):
                exchange.protect("leaked", request["keys"])
            if ARMED.strikes(KV_FAILS):
                return {"error": "injected"}
            if ARMED.strikes(KV_STALLS):
                await ARMED.until_disarmed()
            if ARMED.strikes(KV_LIES):
                lie = await serve(exchange, request)
                return {**lie, "matched": 10**6, "descriptor": b"not a descriptor"}
        return await serve(exchange, request)

    async def finished_faulty(reads: PeerReads, *args: Any) -> int:
        """A copy that is in progress fails or stalls, too."""
        copying = asyncio.ensure_future(finished(reads, *args))
        struck = asyncio.create_task(ARMED.until_armed(KV_COPY_FAILS, KV_STALLS))
        try:
            await asyncio.wait({copying, struck}, return_when=asyncio.FIRST_COMPLETED)
            if not struck.done():
                return await copying
        finally:
            copying.cancel()
            struck.cancel()
            await asyncio.wait({copying, struck})
        if ARMED.strikes(KV_STALLS):
            await ARMED.until_disarmed()
        ARMED.strikes(KV_COPY_FAILS)
        raise ConnectionError("injected")

    KvExchange.serve = serve_faulty
    PeerReads._finished = finished_faulty


def _install_publications() -> None:
    from workers.publisher import Publisher

    view = Publisher._view

    def nonsensical(publisher: Publisher) -> WorkerView:
        published = view(publisher)
        if not ARMED.strikes(NONSENSE):
            return published
        kinds: list[Mapping[str, Any]] = [
            {"kv_used_tokens": -5},
            {"decode_batch": "many"},
            {"kv_capacity_tokens": float("nan")},
            {"held_tokens": {"nobody": -1}},
            {"max_context_tokens": 10**30},
        ]
        return replace(published, **kinds[ARMED.struck[NONSENSE] % len(kinds)])

    Publisher._view = nonsensical


def _install_engine() -> None:
    from workers.engines.modelled import ModelledEngine
    from workers.engines.modelled_request import TimeLine
    from workers.engines.modelled_tokens import ContextHash, Token, TokenSource

    decode_step, submit, work = ModelledEngine._decode_step, ModelledEngine._submit, TimeLine.work

    async def step(engine: ModelledEngine) -> None:
        if ARMED.strikes(ENGINE_BREAKS):
            raise ZeroDivisionError("injected")
        await decode_step(engine)

    async def hang(time_line: TimeLine, *args: Any) -> None:
        """Prefills and decode steps in progress hang, too."""
        await work(time_line, *args)
        if ARMED.strikes(ENGINE_HANGS):
            await asyncio.get_running_loop().create_future()

    def admit(engine: ModelledEngine) -> Any:
        if ARMED.strikes(ENGINE_BREAKS):
            raise ZeroDivisionError("injected")
        return admit_before(engine)

    def die(engine: ModelledEngine, request: Any) -> Any:
        if request.token_ids[: len(DEADLY_PROMPT)] == DEADLY_PROMPT:
            os.kill(os.getpid(), signal.SIGKILL)
        return submit(engine, request)

    def choose(source: TokenSource, state: ContextHash, *args: Any) -> Token:
        if ARMED.strikes(REPEATS_TOKENS):
            state = ContextHash(())
        return choose_before(source, state, *args)

    choose_before, TokenSource.choose = TokenSource.choose, choose
    admit_before = ModelledEngine._admit
    ModelledEngine._decode_step = step
    TimeLine.work = hang
    ModelledEngine._admit = admit
    ModelledEngine._submit = die


if __name__ == "__main__":
    from workers.__main__ import main

    install()
    exit_now(main())
