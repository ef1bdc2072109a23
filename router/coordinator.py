"""The coordinator as Dynamo sees it: a handler of preprocessed requests."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from dynamo.llm import HttpError

from ampd.perf.model import PerformanceModel
from ampd.policies.base import BindingPolicy, PoolsPolicy, RoutingPolicy
from ampd.policies.pools.static import StaticPools
from ampd.state.store import StateStore
from ampd.state.view import ClusterView
from ampd.telemetry import tracing
from ampd.telemetry.logs import RoundLog, say
from router.calls import CallContext, WorkerCalls
from router.errors import RequestError
from router.guard import StreamGuard
from router.outputs import Chunk, merged_usage
from router.placement import PlacementCounters, Placer
from router.pools import PoolsKeeper
from router.request import Round, parse_round
from router.round_log import end_logger
from router.rounds import RoundRun, Services, release_session
from router.served import Observer
from router.sessions import SessionMemory
from router.settings import CALL_TIMEOUT_S, SUSPECT_S, CoordinatorSettings

log = logging.getLogger(__name__)

_SERVER_ERROR = 500


class Coordinator:
    """Serves rounds. Several replicas may run: what must be agreed on is in the store.

    Use `start` and `stop` around serving; `stop` waits for what the rounds left to do (releases).

    Args:
        pools: changes the workers' roles, if this replica leads; None or the static one: they never change.
        observers: are told of each round at its end.

    Attributes:
        failures: requests that ended with an error, by HTTP status.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        calls: WorkerCalls,
        store: StateStore,
        binding: BindingPolicy,
        routing: RoutingPolicy,
        model: PerformanceModel,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        pools: PoolsPolicy | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        rng = rng or random.Random()
        self.failures: Counter[int] = Counter()
        self._slo = settings.slo
        self._round_log = RoundLog(settings.log_rounds)
        self._view = ClusterView(store, lease_s=settings.lease_s, clock=clock)
        self._guard = StreamGuard(self._view, patience_s=settings.lease_s, clock=clock)
        self._background: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._services = Services(
            placer=Placer(
                self._view,
                store,
                binding,
                routing,
                model,
                session_ttl_s=settings.session_ttl_s,
                suspect_s=SUSPECT_S,
                rng=rng,
                clock=clock,
            ),
            calls=calls,
            sessions=SessionMemory(settings.context_memory_mib << 20),
            guard=self._guard,
            clock=clock,
            spawn=self._spawn,
            policy=settings.routing,
            retries=settings.retries,
            page_size=settings.kv_block_size,
            call_timeout_s=CALL_TIMEOUT_S,
            observers=(end_logger(self._round_log), *observers),
            round_log=self._round_log,
        )
        self._pools: PoolsKeeper | None = None
        if pools is not None and not isinstance(pools, StaticPools):
            self._pools = PoolsKeeper(
                self._view, store, pools, model, settings.slo, settings.pools_interval_s, settings.lease_s, rng, clock
            )

    @property
    def view(self) -> ClusterView:
        """The workers as this replica knows them."""
        return self._view

    @property
    def running(self) -> int:
        """Rounds in progress here."""
        return self._running

    @property
    def placements(self) -> PlacementCounters:
        """What became of sessions here."""
        return self._services.placer.counters

    @property
    def pools(self) -> PoolsKeeper | None:
        """What changes the workers' roles, if anything does."""
        return self._pools

    async def start(self) -> None:
        """Connect to the shared state. Raises `StateUnavailableError`."""
        await self._view.start()
        self._watch = asyncio.create_task(self._guard.run(), name="stream-guard")
        if self._pools is not None:
            self._pools.start()

    async def drained(self) -> None:
        """Wait until no round is in progress here."""
        await self._idle.wait()

    async def stop(self, timeout_s: float = 2.0) -> None:
        """Finish what rounds left to do, as far as `timeout_s` allows, and disconnect."""
        if self._pools is not None:
            await self._pools.stop()
        if self._background:
            await asyncio.wait(self._background, timeout=timeout_s)
        for task in [*self._background, *([self._watch] if self._watch else [])]:
            task.cancel()
        await self._view.stop()

    async def generate(self, request: Mapping[str, Any], context: CallContext) -> AsyncGenerator[Chunk, None]:
        """Serve one round: Dynamo's handler.

        Raises:
            HttpError: with the status that the client gets.
        """
        trace = tracing.begin(context)
        self._running += 1
        self._idle.clear()
        try:
            one = parse_round(request, self._slo)
            trace = trace.of_session(one.session_id)
            if one.max_tokens == 0 and one.is_final:
                yield await self._end(one)
                return
            async with aclosing(trace.follow(RoundRun(one, context, self._services).serve())) as chunks:
                async for chunk in chunks:
                    yield chunk
        except RequestError as error:
            self.failures[error.status] += 1
            trace.enter()
            level = logging.WARNING if error.status >= _SERVER_ERROR else self._round_log.step_level
            say(log, level, "round refused", status=error.status, error=str(error))
            raise HttpError(error.status, trace.quoted(str(error))) from None
        except Exception as error:
            trace.enter()
            self.failures[_SERVER_ERROR] += 1
            log.exception("a round failed in the coordinator")
            raise HttpError(500, trace.quoted(f"the coordinator failed: {error!r}")) from None
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _end(self, one: Round) -> Chunk:
        """A session that ends without another output."""
        await release_session(self._services, one.session_id, set())
        usage = merged_usage(None, len(one.token_ids), 0, None)
        return {"token_ids": [], "finish_reason": "length", "completion_usage": usage}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what a round left to do failed", exc_info=error)
