"""The coordinator as Dynamo sees it: a handler of preprocessed requests."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ampd.background_tasks import BackgroundTasks
from ampd.handler_stream import Chunk, HandlerStream, Send, join_chunks
from ampd.round_end import error_chunk, merged_usage
from ampd.serving.admission import Admission
from ampd.serving.placement import PlacementPolicies
from ampd.serving.roles import POOLS_INTERVAL_S, RoleReview
from ampd.state.redis_store import StateStore
from ampd.state.store import SessionLimits
from ampd.state.view import ClusterView
from ampd.telemetry import tracing
from ampd.telemetry.logs import RoundLog, log_fields
from ampd.telemetry.tracing import Trace, TracedContext
from ampd.wire import AFFINITY, REPEAT, ROUND
from router.admission import AdmissionGate
from router.calls import CallContext, WorkerCalls
from router.decision_record import Observer
from router.frames import Frame
from router.own_graph import OwnGraph
from router.placement import Placer, log_left_out
from router.policies import CoordinatorPolicies
from router.pools import PoolsKeeper
from router.request import RoundRequest, parse_round
from router.round_ends import RoundEnds
from router.round_errors import RoundRefusedError
from router.round_log import end_logger
from router.round_run import END_COMES_S, RoundRun, Services, pipe
from router.round_window import Counts
from router.session_branches import SessionBranches
from router.session_control import SessionControl
from router.session_memory import SessionMemory
from router.settings import CALL_TIMEOUT_S, SUSPECT_S, CoordinatorSettings
from router.targets import TargetLimits
from router.worker_access import LeaseProbe, WorkerAccess
from router.worker_deaths import WorkerDeaths

log = logging.getLogger(__name__)

_SERVER_ERROR = 500
_MOST_REFUSALS = 4096
"""Refusals of frames that Dynamo's handler has not sent yet."""
_MOST_NAMED = 256
"""Rounds whose output the status relay may ask for again."""

_WARN_AT = 20
"""A client that tries the graph out needs no session. One that sends this many rounds is probably an agent."""

_CONTEXT_MEMORY_BYTES = 256 << 20
"""For the last contexts of sessions, which show rewritten prompts."""
_MOST_BACKGROUND_TASKS = 4096
"""Calls end within seconds, so only workers or a state that hang let this many gather. Further work is dropped, because
each kind of it is a shortcut for an end that comes anyway: an entered prefill that its worker does not list is
forgotten, bindings and KV of a session end by their time, and KV that was not taken over is computed again."""


class Coordinator:
    """Serves rounds. Several replicas may run; they agree through the store.

    Call `start` before and `stop` after serving. `stop` waits for the background work of rounds (releases).

    Args:
        observers: called with each round at its end.
        vocabulary_size: of the model; None: it is not known, and token ids are left to the workers.
        tokenizer: digest of the frontends' tokenizer. Workers with another one get no rounds. "": it is not known.

    Attributes:
        view: the workers as this replica knows them.
        pools: changes the workers' roles; None: they never change.
        gate: refuses rounds because of load.
        failures: requests that ended with an error, by HTTP status.
        counts: of events.
        branches: of sessions.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        calls: WorkerCalls,
        store: StateStore,
        policies: CoordinatorPolicies,
        observers: tuple[Observer, ...] = (),
        vocabulary_size: int | None = None,
        tokenizer: str = "",
    ) -> None:
        rng, clock = random.Random(), time.monotonic
        self._targets = TargetLimits(settings.slo, settings.target_floor, settings.target_cap)
        self._vocabulary_size = vocabulary_size
        self._round_log = RoundLog(settings.log_rounds)
        self._background = BackgroundTasks(_MOST_BACKGROUND_TASKS)
        self.failures: Counter[int] = Counter()
        self.counts = Counts()
        limits = SessionLimits(
            ttl_s=settings.session_ttl_s,
            first_ttl_s=settings.session_first_ttl_s,
            per_graph=settings.max_sessions,
            per_tenant=settings.max_sessions_per_tenant,
        )
        self._own = OwnGraph(tokenizer)
        sessions = SessionMemory(_CONTEXT_MEMORY_BYTES, limits, clock)
        self.branches = SessionBranches(sessions, limits.new_ttl_s, clock)
        self.view = ClusterView(
            store,
            lease_s=settings.lease_s,
            clock=clock,
            model=policies.model,
            serves=self._own.serves,
            on_session_end=self.branches.forget,
        )
        access = WorkerAccess(self.view, store, calls, CALL_TIMEOUT_S)
        self._ends: RoundEnds[RoundRun] = RoundEnds(access.lost, clock)
        self._calls = calls
        self._refusals: dict[str, Chunk] = {}
        self._named: dict[str, RoundRun] = {}
        admission = Admission(settings.max_wait, settings.max_rounds, policies.model, settings.slo, rng)
        self.gate = AdmissionGate(admission, self.view, lambda: self.running, self.counts)
        self.pools = _pools_keeper(settings, policies, self.view, store, rng, clock)
        placement = PlacementPolicies(policies.binding, policies.routing, policies.model, rng, log_left_out)
        self._services = Services(
            placer=Placer(
                self.view,
                store,
                placement,
                limits,
                SUSPECT_S,
                self.gate,
                self._background.spawn,
                self.counts,
                settings.moves,
                sessions.rebound,
                clock,
            ),
            access=access,
            sessions=sessions,
            branches=self.branches,
            policy=settings.routing,
            retries=settings.retries,
            page_size_tokens=settings.kv_block_size,
            clock=clock,
            spawn=self._background.spawn,
            deaths=WorkerDeaths(store),
            ends=self._ends,
            refused=self._note_refusal,
            observers=(end_logger(self._round_log), *observers),
            round_log=self._round_log,
        )
        self._lease_probe = LeaseProbe(self.view, calls, CALL_TIMEOUT_S)
        self.store_answered = self._services.placer.store_answered

    @property
    def running(self) -> int:
        """Rounds in progress here."""
        return len(self._ends.in_progress)

    @property
    def session_moves(self) -> Counter[str]:
        """How many sessions this replica moved because it pays, by reason."""
        return self._services.placer.moves_made

    def sessions(self, keys: tuple[bytes, ...]) -> SessionControl:
        """Lists, shows and ends sessions, for whoever knows a secret of the graph."""
        return SessionControl(self._services, keys)

    @property
    def worker_deaths(self) -> int:
        """Workers that died while they had a round of this replica, once per round."""
        return self._services.deaths.count

    async def start(self, keys: tuple[bytes, ...] = ()) -> None:
        """Connect to the shared state, and listen to workers.

        Args:
            keys: the secrets of the graph.

        Raises:
            StateUnavailableError
        """
        self._own.sign_with(keys)
        await self.view.start()
        await self._ends.listen(keys)
        self._ends.start()
        self._lease_probe.start()
        if self.pools is not None:
            self.pools.start()

    async def drained(self) -> None:
        """Wait until no round is in progress here."""
        await self._ends.in_progress.drained()

    async def stop(self, timeout_s: float = 2.0) -> None:
        """Finish the background work of rounds, as far as `timeout_s` allows, and disconnect."""
        if self.pools is not None:
            await self.pools.stop()
        await self._ends.stop()
        await self._background.finish(timeout_s)
        await self._lease_probe.stop()
        await self.view.stop()

    def generate(self, request: Mapping[str, Any], context: CallContext) -> HandlerStream[Chunk]:
        """Serve one round: Dynamo's handler. A round that fails ends with an `error_chunk`."""
        return HandlerStream(partial(self._serve, request, context), join_chunks)

    async def take(self, frame: Frame, taken: Callable[[], None]) -> bool:
        """Hand a frontend's request on to the worker that answers it. False: `generate` is to answer.

        Args:
            taken: called when a worker has the request, so that the end of this process does not lose it.
        """
        trace = tracing.begin(frame)
        try:
            wanted = self._read(frame.request(), frame)
            if frame.metadata.get(REPEAT) or (wanted.max_tokens == 0 and wanted.is_final):
                return False
            while True:
                run = await self._begin(wanted, frame.id())
                if not await run.give(partial(self._calls.hand_on, frame), frame.is_stopped):
                    return False
                taken()
                if await run.until_answered():
                    return True
        except RoundRefusedError as error:
            if len(self._refusals) >= _MOST_REFUSALS:
                del self._refusals[next(iter(self._refusals))]  # nobody has asked for it
            self._refusals[frame.id()] = self._refused(error, trace)
            return False

    async def _serve(self, request: Mapping[str, Any], context: CallContext, send: Send[Chunk]) -> None:
        if (refusal := self._refusals.pop(context.id(), None)) is not None:
            send(refusal)
            return
        trace = tracing.begin(context)
        try:
            wanted = self._read(request, context)
            del request  # its list of token ids is large
            if name := context.metadata.get(REPEAT):
                send(await self._repeated(name))
            elif wanted.max_tokens == 0 and wanted.is_final:
                with self._ends.in_progress.round():
                    send(await self._end_session(wanted))
            else:
                await pipe(await self._begin(wanted, context.id()), self._calls, context, send)
        except RoundRefusedError as error:
            send(self._refused(error, trace))
        except Exception as error:
            self.failures[_SERVER_ERROR] += 1
            log.exception("a round failed in the coordinator")
            send(error_chunk(_SERVER_ERROR, trace.quoted(f"the coordinator failed: {error!r}")))

    def _read(self, request: Mapping[str, Any], context: TracedContext) -> RoundRequest:
        wanted = parse_round(request, self._targets, self._vocabulary_size, context.metadata.get(AFFINITY))
        if (trace := tracing.current()) is not None:
            trace.of_session(wanted.client_session_id or wanted.session_id)
        return wanted

    async def _begin(self, wanted: RoundRequest, request_id: str) -> RoundRun:
        before = await self._ends.before(request_id)
        run = RoundRun(wanted, request_id, self._services, before)
        if (trace := tracing.current()) is not None:
            trace.of_session(run.request.client_session_id or run.session_id)
            if name := trace.context.metadata.get(ROUND):
                self._named[name] = run
                if len(self._named) > _MOST_NAMED:
                    del self._named[next(iter(self._named))]
        if before is None and not (run.request.is_named or wanted.continued_tokens):
            self._count_unnamed()  # another coordinator has counted a continued one
        return run

    def _count_unnamed(self) -> None:
        self.counts.add("unnamed")
        if self.counts["unnamed"] == _WARN_AT:
            log.warning(
                "%d rounds came without a session, and continued none: each was prefilled from its first token, on any "
                "worker. If they are an agent's, send the header x-dynamo-session-id (docs/clients.md); this is logged "
                "once",
                _WARN_AT,
            )

    def _refused(self, error: RoundRefusedError, trace: Trace) -> Chunk:
        self._note_refusal(error.status, str(error))
        return error_chunk(error.status, trace.quoted(str(error)))

    def _note_refusal(self, status: int, message: str) -> None:
        self.failures[status] += 1
        level = logging.WARNING if status >= _SERVER_ERROR else self._round_log.end_level
        log_fields(log, level, "round refused", status=status, error=message)

    async def _repeated(self, name: str) -> Chunk:
        """The whole output of a round again. Its frontend may know of its end before this process."""
        if (run := self._named.get(name)) is not None:
            await run.until_over(END_COMES_S)
        return {"token_ids": run.output if run else [], "finish_reason": "stop"}

    async def _end_session(self, request: RoundRequest) -> Chunk:
        """End a session without another output."""
        await self._services.end_session(request.session_id, request.tenant, set())
        usage = merged_usage(None, request.prompt_tokens, 0, None)
        return {"token_ids": [], "finish_reason": "length", "completion_usage": usage}


def _pools_keeper(
    settings: CoordinatorSettings,
    policies: CoordinatorPolicies,
    view: ClusterView,
    store: StateStore,
    rng: random.Random,
    clock: Callable[[], float],
) -> PoolsKeeper | None:
    policy = policies.pools
    if policy is None or policy.is_idle:
        return None
    review = RoleReview(policy, policies.model, settings.slo, rng)
    return PoolsKeeper(view, store, review, POOLS_INTERVAL_S, settings.lease_s, clock)
