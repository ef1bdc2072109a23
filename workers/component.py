"""The worker as a Dynamo component: endpoints `prefill`, `generate` and `kv`, one engine, one lease."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from math import log as logarithm
from typing import Any

from dynamo.common.utils.graceful_shutdown import graceful_shutdown_with_discovery
from dynamo.llm import HttpError
from dynamo.runtime import Context, DistributedRuntime, Endpoint

from ampd import compiled
from ampd.background_tasks import SupervisedTask
from ampd.call_signatures import Signer, Verifier, read_secrets
from ampd.child_process import end_within
from ampd.discovery_entries import DiscoveryEntries, DiscoveryEntry, deletes_silent_entries
from ampd.errors import RunError, UserError
from ampd.handler_stream import Chunk, HandlerStream, Send, join_chunks
from ampd.perf.corrections import CorrectedModel
from ampd.policies.estimates import queued_s
from ampd.policies.registry import create_named
from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import StateUnavailableError
from ampd.telemetry import tracing
from ampd.telemetry.metrics import exposition, names
from ampd.telemetry.metrics.exposition import ProcessCollector, Reading, expose
from ampd.telemetry.metrics.names import Process
from ampd.types import MOST_FACTOR, Role, WorkerView
from ampd.wire import COMPONENT, GENERATE_ENDPOINT, KV_ENDPOINT, PREFILL_ENDPOINT, error_text, fields_of
from workers.call_guard import CallGuard, CallRefusedError
from workers.client_rounds import ClientRounds
from workers.client_stream import grouped
from workers.engines import create_engine, performance_model
from workers.engines.base import Engine, EngineError
from workers.engines.supervised import SupervisedEngine
from workers.parts import WorkerParts
from workers.peers import DynamoPeers
from workers.role import follow_roles
from workers.round_ends import RoundEnds
from workers.session_releaser import SessionEnds
from workers.settings import PROG, WorkerSettings

# -- The metrics of a worker that are read from its parts at each scrape; `worker_recorder` counts the others.


class WorkerReader:
    """Reads the metrics that mirror the state of a worker's parts."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts

    def __call__(self) -> Iterator[Reading]:
        """All readings; on the worker's event loop."""
        parts = self._parts
        view, settings = parts.read_view(), parts.settings
        info = (settings.engine, str(view.parallelism.tp), settings.ordering, settings.slicing)
        yield Reading(names.WORKER_INFO, 1, info)
        for role in Role:
            yield Reading(names.WORKER_ROLE, view.role is role, (role,))
            yield Reading(names.ROLE_CHANGES, parts.role.changes[role], (role,))
        yield Reading(names.WORKER_ROUNDS, parts.rounds.running)
        yield Reading(names.DECODE_BATCH, view.decode_batch)
        yield Reading(names.DECODE_CONTEXT, view.decode_context_tokens)
        for kind, factor in fields_of(view.parallelism.factors).items():
            yield Reading(names.TIME_FACTOR, factor, (kind,))
        yield from self._queued(view)
        yield from self._memory(view)
        yield from parts.store.readings(is_available=parts.publisher.available)

    def _queued(self, view: WorkerView) -> Iterator[Reading]:
        yield Reading(names.QUEUE_TASKS, view.queued_prefills)
        yield Reading(names.POSTPONEMENTS, self._parts.queue.postponements)
        for reason in names.DROPS:
            yield Reading(names.PREFILLS_DROPPED, self._parts.queue.dropped[reason], (reason,))
        try:
            yield Reading(names.QUEUE_WAIT, queued_s(view, self._parts.model))
        except UserError:
            return  # a parallelism that the performance model lacks

    def _memory(self, view: WorkerView) -> Iterator[Reading]:
        parts = self._parts
        store = parts.engine.kv.figures
        yield Reading(names.KV_PINNED, view.store_used_tokens)
        yield Reading(names.KV_USED, view.kv_used_tokens)
        yield Reading(names.KV_CAPACITY, view.kv_capacity_tokens)
        yield Reading(names.STORE_USED_BYTES, store.used_bytes)
        yield Reading(names.STORE_CAPACITY_BYTES, store.capacity_bytes)
        yield Reading(names.STORE_USED, store.used_tokens)
        yield Reading(names.STORE_CAPACITY, view.store_capacity_tokens)
        for cause in names.EVICTION_CAUSES:
            yield Reading(names.STORE_EVICTED, store.evicted_tokens.get(cause, 0), (cause,))
        yield Reading(names.SESSIONS_HELD, len(parts.changes.held_tokens))
        yield Reading(names.SESSIONS_LOST, parts.sessions.evicted, (names.EVICTED,))
        yield Reading(names.SESSIONS_LOST, parts.sessions.expired, (names.IDLE,))


# -- One warning when an engine has long taken twice as long as its performance model says, or half as long.

log = logging.getLogger(__name__)

_KINDS = {"prefill": "prefills", "step": "decode steps", "mixed": "mixed passes", "read": "reads of KV"}
"""Those that `ampd profile` measures."""

_FACTOR = 2.0
_CHECK_S = 5.0
_CHECKS = 12
"""In a row. Together they last a minute."""


async def warn_of_wrong_times(
    times: CorrectedModel, settings: WorkerSettings, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Return after the warning."""
    checks = Counter[str]()
    while True:
        await sleep(_CHECK_S)
        factors = fields_of(times.parallelism.factors)
        for kind in _KINDS:
            checks[kind] = checks[kind] + 1 if abs(logarithm(factors[kind])) >= logarithm(_FACTOR) else 0
        if max(checks.values()) >= _CHECKS:
            wrong = [f"{text} {factors[kind]:.2g} times" for kind, text in _KINDS.items() if checks[kind] >= _CHECKS]
            log.warning(
                "for a minute %s have taken as long as --perf %s says; predictions are corrected, by a factor of %g at "
                "most. Measure the engine: ampd profile --engine %s --model %s --tp %d --output FILE, and serve with "
                "--perf FILE",
                " and ".join(wrong),
                settings.perf,
                MOST_FACTOR,
                settings.engine,
                settings.model,
                settings.tp,
            )
            return


log = logging.getLogger(__name__)

Handler = Callable[[Any, Context], AsyncIterator[Any]]
_LONGEST_END_S = 60.0
"""Of a worker that serves no more, with its engine."""


async def serve_worker(runtime: DistributedRuntime, settings: WorkerSettings) -> None:
    """Run one worker until a signal ends it.

    Raises:
        UserError: the settings name something that is not there, or a shared state that does not answer.
        RunError: the engine does not start or was lost, or the shared state was lost at the start.
    """
    ordering = create_named("ordering", settings.ordering)
    model = performance_model(settings)
    keys = read_secrets(settings.graph_secret_file, PROG)
    path = f"{settings.namespace}.{COMPONENT}"
    async with AsyncExitStack() as stack:
        store = await _open_store(settings, stack)
        engine = await _start_engine(settings, model, stack)
        endpoints = {
            name: runtime.endpoint(f"{path}.{name}") for name in (PREFILL_ENDPOINT, GENERATE_ENDPOINT, KV_ENDPOINT)
        }
        worker_id = f"{endpoints[GENERATE_ENDPOINT].connection_id():x}"
        parts = WorkerParts(worker_id, settings, engine, store, model, ordering, keys=keys)
        signer = Signer(keys, f"{COMPONENT}-{worker_id}")
        kv, prefills = await endpoints[KV_ENDPOINT].client(), await endpoints[PREFILL_ENDPOINT].client()
        peers = DynamoPeers(kv, prefills, worker_id, signer)
        engine.kv.connect(peers, parts.held)
        ends = RoundEnds(worker_id, signer)
        ends.start()
        stack.push_async_callback(ends.stop)
        context_limit = engine.info.max_context_tokens
        sessions = SessionEnds(store, worker_id)
        sessions.start()
        stack.push_async_callback(sessions.stop)
        answering = ClientRounds(worker_id, parts.rounds, peers, ends, sessions, settings.stream_tokens, context_limit)
        _start_in_background("roles", partial(follow_roles, store, worker_id, parts.changes.changed), stack)
        _start_in_background("session-sweeper", parts.sessions.run, stack)
        _start_in_background("wrong-times", partial(warn_of_wrong_times, model, settings), stack)
        expose(
            ProcessCollector(Process.WORKER, parts.recorder.recorded, WorkerReader(parts), asyncio.get_running_loop()),
            endpoints[GENERATE_ENDPOINT],
            namespace=settings.namespace,
            component=COMPONENT,
            name=GENERATE_ENDPOINT,
            model_name=settings.model.name,
        )
        exposition.log_address(runtime)
        guard = CallGuard(Verifier(keys, worker_id), parts.recorder)
        try:
            await Worker(runtime, parts, endpoints, guard, answering).run()
        finally:
            end_within(_LONGEST_END_S)


LEAST_S = 10.0
"""A publication to a shared state that hangs takes less: it is given up, and counts as a sign of life."""
_TICKS = 8
_LOG_S = 1.0
_FAILED = 1


class Watchdog:
    """A thread that ends the process when the event loop, or the renewal of the lease, stands still for two leases.

    By then coordinators have counted the worker as lost for a lease. Time passes in ticks of the thread: when the
    machine is busy, sleeps or collects garbage, the thread stands still too, and one late tick is one tick.

    Args:
        renewals: how often the lease was renewed, or could not be because of the shared state; None: it is not to be.
    """

    def __init__(self, lease_s: float, renewals: Callable[[], int | None]) -> None:
        self._limit_s = max(LEAST_S, 2 * lease_s)
        self._renewals = renewals
        self._renewed: int | None = None
        self._loop_ticks = self._lease_ticks = 0
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch the running event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """The process ends, or need not be watched any more."""
        self._stopped.set()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopped.wait(self._limit_s / _TICKS):
            if max(self._loop_ticks, self._lease_ticks) >= _TICKS:
                self._end("the event loop" if self._loop_ticks >= _TICKS else "the renewal of the lease")
            self._loop_ticks += 1
            self._lease_ticks += 1
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        """On the event loop."""
        self._loop_ticks = 0
        renewed = self._renewals()
        if renewed is None or renewed != self._renewed:
            self._lease_ticks, self._renewed = 0, renewed

    def _end(self, what: str) -> None:
        # What hangs may hold the lock of the log.
        end_within(_LOG_S)
        log.error("%s stood still for %g s: this worker ends, so that its rounds go on elsewhere", what, self._limit_s)
        os._exit(_FAILED)


class Worker:
    """Serves a worker's parts as Dynamo endpoints until a signal comes or the engine is lost for good.

    Args:
        endpoints: name -> endpoint, of the three that are served.
        guard: checks each call.
        answering: answers the clients of rounds.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        parts: WorkerParts,
        endpoints: dict[str, Endpoint],
        guard: CallGuard,
        answering: ClientRounds,
    ) -> None:
        self._runtime = runtime
        self._guard = guard
        self._settings = parts.settings
        self._engine = parts.engine
        self._rounds = parts.rounds
        self._answering = answering
        self._publisher = parts.publisher
        self._endpoints = endpoints
        self._entries = {name: DiscoveryEntry(endpoint) for name, endpoint in endpoints.items()}
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._shutdown: asyncio.Task[None] | None = None
        # Held while the engine starts again, so that a worker without its engine does not enter the shared state.
        self._presence = asyncio.Lock()
        self._is_announced = False

    async def run(self) -> None:
        """Serve until a signal comes or the engine is lost for good."""
        handlers: dict[str, Handler] = {
            PREFILL_ENDPOINT: self._guarded(PREFILL_ENDPOINT, self._rounds.prefill),
            GENERATE_ENDPOINT: self._guarded(GENERATE_ENDPOINT, self._rounds.generate),
            KV_ENDPOINT: self._kv,
        }
        self._install_signal_handlers()
        serving = asyncio.gather(
            *(endpoint.serve_endpoint(handlers[name]) for name, endpoint in self._endpoints.items())
        )
        watching = SupervisedTask("engine-watch", self._watch_engine)
        watching.start()
        entries = DiscoveryEntries(self._wanted_entries)
        if deletes_silent_entries():
            entries.start()
        watchdog = Watchdog(self._settings.lease_s, lambda: self._publisher.renewals)
        watchdog.start()
        exposition.answer_liveness(self._runtime)
        # Not after the registration: on Kubernetes only what is ready is discovered.
        exposition.set_ready(self._runtime, True)
        try:
            await self._announce(serving)
            ends: set[asyncio.Future[Any]] = {serving, self._lost}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                exposition.set_ready(self._runtime, False)
                await self._publisher.retire()
                raise RunError(f"ampd worker: {self._lost.result()}")
            await serving
        finally:
            watchdog.stop()
            await entries.stop()
            await watching.stop()
            if not serving.done():
                self._runtime.shutdown()
                await asyncio.wait({serving}, timeout=5.0)
            if self._shutdown:
                await asyncio.wait({self._shutdown})

    async def _announce(self, serving: asyncio.Future[Any]) -> None:
        """Enter the shared state when callers can reach every endpoint."""
        for entry in self._entries.values():
            listed = asyncio.create_task(entry.until_listed())
            try:
                await asyncio.wait({serving, listed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                listed.cancel()
            if serving.done():
                await serving
                raise RunError(
                    "ampd worker: Dynamo ended before the worker was registered; its lines above say why (a watch "
                    "that ended: the machine is out of inotify instances, see fs.inotify.max_user_instances)"
                )
            await listed
        try:
            async with self._presence:
                if self._shutdown:
                    return
                await self._publisher.start()
                self._is_announced = True
        except StateUnavailableError as error:
            raise RunError(f"ampd worker: {error}") from None
        log.info(
            "%s worker %x is ready; performance model %s; decisions: %s",
            self._settings.role,
            self._endpoints[GENERATE_ENDPOINT].connection_id(),
            self._settings.perf,
            compiled.state(),
        )

    def _wanted_entries(self) -> list[DiscoveryEntry]:
        """Those of a worker that has entered the shared state and does not end."""
        return list(self._entries.values()) if self._is_announced and self._shutdown is None else []

    async def _watch_engine(self) -> None:
        if isinstance(self._engine, SupervisedEngine):
            line = await self._engine.wait_lost(self._absence)
            if not self._lost.done():
                self._lost.set_result(line)

    @asynccontextmanager
    async def _absence(self) -> AsyncIterator[None]:
        """Out of the shared state, by which coordinators go, during the block and after an error in it.

        /health stays good: /live has the same answer, and a failing liveness probe would end the process and its KV.
        """
        if self._shutdown is not None:
            raise EngineError("the worker is ending")
        async with self._presence:
            await self._publisher.retire()
            yield
            if self._is_announced and self._shutdown is None:
                self._publisher.resume()

    # -- handlers

    def _guarded(self, endpoint: str, serve_round: Callable[[Any, Send[Chunk]], Awaitable[None]]) -> Handler:
        async def serve(request: Any, context: Context, send: Send[Chunk]) -> None:
            tracing.proceed(context)
            try:
                self._guard.check(context.metadata, endpoint, request)
                if "start" in request:
                    await self._answering.serve(request, context, send)
                    return
                # An error comes after the tokens before it, so that no more than necessary is computed again.
                with grouped(send, self._settings.stream_tokens, request["task"]["slo"]["itl_s"]) as send_grouped:
                    if not context.is_stopped():
                        await serve_round(request, send_grouped)
            except (EngineError, CallRefusedError) as error:
                raise HttpError(error.status, error_text(error.status, str(error))) from None
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                log.exception("a round failed")
                raise HttpError(500, error_text(500, f"the worker cannot read the request: {error!r}")) from None
            except Exception as error:
                log.exception("a round failed")
                raise HttpError(500, error_text(500, f"the worker failed: {error!r}")) from None

        def handle(request: Any, context: Context) -> AsyncIterator[Chunk]:
            return HandlerStream(partial(serve, request, context), join_chunks, context)

        return handle

    async def _kv(self, request: Any, context: Context) -> AsyncIterator[Any]:
        tracing.proceed(context)
        try:
            self._guard.check(context.metadata, KV_ENDPOINT, request)
            yield await self._rounds.kv(request)
        except CallRefusedError as error:
            # As an answer, because Dynamo logs each exception with its traceback, and a stranger may call often.
            yield {"error": str(error)}
        except Exception as error:
            log.exception("a KV call failed")
            yield {"error": repr(error)}

    # -- the end

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._begin_shutdown)

    def _begin_shutdown(self) -> None:
        if self._shutdown is None:
            self._shutdown = asyncio.create_task(self._end())

    async def _end(self) -> None:
        """Leave: no new rounds, running ones finish, the KV stays readable until they have."""
        # Coordinators go by the shared state, so leave that first; discovery follows.
        await self._publisher.retire()
        await graceful_shutdown_with_discovery(
            self._runtime,
            [self._entries[PREFILL_ENDPOINT], self._entries[GENERATE_ENDPOINT]],
            grace_period_s=self._settings.grace_s,
            drain_callback=self._drain,
        )

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self._answering.drained()
        except TimeoutError:
            log.warning("%d rounds did not finish in %g s", self._rounds.running, self._settings.drain_s)


async def _open_store(settings: WorkerSettings, stack: AsyncExitStack) -> StateStore:
    try:
        store = await open_store(settings.state_url, settings.namespace)
    except StateUnavailableError as error:
        raise UserError(f"{PROG}: --state-url: {error}") from None
    stack.push_async_callback(store.close)
    return store


async def _start_engine(settings: WorkerSettings, model: CorrectedModel, stack: AsyncExitStack) -> Engine:
    engine = SupervisedEngine(create_engine(settings, model), model)
    stack.push_async_callback(engine.stop)
    try:
        await engine.start()
    except EngineError as error:
        raise RunError(f"ampd worker: {error}") from None
    return engine


def _start_in_background(name: str, work: Callable[[], Awaitable[None]], stack: AsyncExitStack) -> None:
    task = SupervisedTask(name, work)
    task.start()
    stack.push_async_callback(task.stop)
