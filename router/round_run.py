"""One round from its request to its end: place it, give it to its decode worker, and learn what became of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Any

from ampd.errors import one_line_of
from ampd.handler_stream import Chunk, Send
from ampd.keys import TOKEN_BYTES
from ampd.round_end import Begun, PrefillFailed, RoundEnded, error_chunk, goes_on_elsewhere
from ampd.serving.local_only import RESUMED, local_only
from ampd.serving.moves import drops_history
from ampd.state.store import TaskDone
from ampd.telemetry import tracing
from ampd.telemetry.logs import RoundLog
from ampd.types import Route
from ampd.wire import ENGINE_DIED, OVERLOADED, GenerateRequest, RoundReport, Source, encode_task
from router.calls import CallContext, WorkerCalls
from router.decision_record import DecisionRecord, Observer, notify
from router.fingerprints import mark_of
from router.placement import Placement, Placer
from router.request import RoundRequest, link
from router.round_ends import RoundEnds
from router.round_errors import RoundRefusedError, WorkerLostError, WorkerRefusedError
from router.round_log import log_placed
from router.session_branches import Found, SessionBranches
from router.session_memory import SessionMemory, SessionOwner
from router.unplaced_round import KnownPrefixes, PromptHistory, UnplacedRound
from router.worker_access import WorkerAccess
from router.worker_deaths import RequestDeaths, WorkerDeaths

log = logging.getLogger(__name__)

UNAVAILABLE = 503
_SERVER_ERROR = 500
END_COMES_S = 1.0
"""In which a worker has told how a round ended, after its stream ended or broke off."""

Deliver = Callable[[str, GenerateRequest], Awaitable[None]]
"""Gives a round to a worker, by its id. It raises an error of `router.round_errors` if the worker does not take it."""


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a coordinator that its rounds use.

    Attributes:
        policy: name of the routing policy, for the decision record.
        retries: lost workers that a round survives.
        page_size_tokens: tokens per KV page of the workers.
        spawn: starts work that outlives the round.
        deaths: the workers that died under rounds.
        ends: the rounds that workers have.
        refused: called with the status and the message of a round that its worker has refused.
        observers: called with each round at its end.
        round_log: which log lines are written for rounds that go well.
        prefixes: the prefixes that sessions share.
    """

    placer: Placer
    access: WorkerAccess
    sessions: SessionMemory
    branches: SessionBranches
    policy: str
    retries: int
    page_size_tokens: int
    clock: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    deaths: WorkerDeaths
    ends: RoundEnds[Any]
    refused: Callable[[int, str], None] = lambda _status, _message: None
    observers: tuple[Observer, ...] = ()
    round_log: RoundLog = RoundLog.END
    prefixes: KnownPrefixes = field(default_factory=KnownPrefixes)

    async def end_session(self, session_id: str, tenant: str, used: set[str], *, is_unbound: bool = False) -> None:
        """End a session with its branches everywhere: in this replica's memory, in the shared state and on the workers.

        Args:
            used: workers that served the session's last round.
            is_unbound: the worker that ended this round ends the session's own binding.
        """
        branches = self.branches.of(session_id)[1:]
        self.branches.forget(session_id)
        end = self.access.end_session
        await asyncio.gather(
            end(session_id, tenant, used, is_unbound=is_unbound), *(end(key, tenant, set()) for key in branches)
        )


class RoundRun(UnplacedRound):
    """The life of one round. However it ends, no queued task stays behind.

    `_unreached` is the placement whose task may not have reached its worker, because no output of it is known yet. It
    must be withdrawn if the round ends. A worker does not begin a call whose client has gone already.

    Args:
        request_id: of the client's request.
        before: an earlier try of the same request, which its worker has lost. The frontend sends such a request again,
            with the output so far.

    Attributes:
        given_s: when its worker got it.
        was_answered: its frontend has a connection to the worker that has the round, or had it.
        end: what its worker told of its end; None: nothing, or not yet.
    """

    def __init__(
        self, request: RoundRequest, request_id: str, services: Services, before: RoundRun | None = None
    ) -> None:
        self._found: Found = services.branches.begin(request) if before is None else before._found
        named = self._found.request
        if named.session_id != request.session_id:
            request = replace(request, session_id=named.session_id, client_session_id=named.client_session_id)
        self.request, self.request_id, self.goes_on = request, request_id, self._found.goes_on
        self._services = services
        self._before_tokens = 0
        self.session = services.sessions.find(request.session_id)
        if before is None:
            self.arrival_s = services.clock()
            trace = tracing.current()
            self._record = DecisionRecord(
                session_id=request.client_session_id or request.session_id,
                policy=services.policy,
                slo=request.slo,
                session_key=request.session_id,
                request_id=trace.request_id if trace else request_id,
                trace_id=trace.trace_id if trace else None,
                clamped_targets=request.clamped_targets,
            )
            self.deaths = RequestDeaths(services.deaths, request)
            self.avoided = set()
            self._untaken = 0
            self._last_error: Exception | None = None
            self.holder = self.session.holder
            self._kv_source: str | None = None
            self._placement: Placement | None = None
        else:
            self._inherit(before)
        self.history = PromptHistory(
            request,
            self._record,
            self.session,
            services.access,
            services.page_size_tokens,
            services.prefixes,
            self._found,
        )
        self._unreached: Placement | None = None
        self._is_closed = False
        self._within = copy_context()  # what workers tell is of this round's trace
        self._over = asyncio.Event()
        self._sign = asyncio.Event()
        self.was_answered = False
        self.given_s = 0.0
        self.end: RoundEnded | None = None
        services.ends.in_progress.begin()

    def _inherit(self, before: RoundRun) -> None:
        """Go on from where the earlier try was lost. A round without output still counts from its first arrival."""
        has_output = self.request.has_output
        self.arrival_s = self._services.clock() if has_output else before.arrival_s
        self._before_tokens = self.request.continued_tokens
        self._record, self.deaths = before._record, before.deaths
        self._record.ttft_s, self._record.itl_s, self._record.output_tokens = None, None, self._before_tokens
        self.avoided, self._last_error, self.holder = before.avoided, before._last_error, before.holder
        self._untaken = before._untaken
        self._placement = before._placement
        # A prefill worker of the round still has the whole context: the next decode worker reads it from there.
        source = before._kv_source if has_output else None
        self._kv_source = None if source in self.avoided else source

    @property
    def worker_id(self) -> str:
        """The decode worker that has the round, or had it last."""
        return self._placement.binding.worker_id if self._placement else ""

    @property
    def is_over(self) -> bool:
        """Whether no worker has the round."""
        return self._over.is_set()

    @property
    def output(self) -> list[int]:
        """What its client has got; empty: its worker has not told it."""
        before = self.request.client_prompt_tokens * TOKEN_BYTES
        return memoryview(self.request.prompt[before:] + self.end.tokens).cast("I").tolist() if self.end else []

    async def until_answered(self) -> bool:
        """Wait for a sign of life of its worker. False: the worker was lost before it had a connection to the frontend.

        Such a frontend would wait for ever, so that another worker must get the round.
        """
        await self._sign.wait()
        return self.was_answered

    async def until_over(self, timeout_s: float) -> None:
        """Wait for the end of the round at its worker, at most for `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._over.wait()

    # -- to the decode worker

    async def give(self, deliver: Deliver, is_stopped: Callable[[], bool]) -> bool:
        """Place the round, and give it to its decode worker.

        Args:
            is_stopped: whether the client has gone.

        Returns:
            Whether a worker took it. Otherwise its client has gone.

        Raises:
            RoundRefusedError: it cannot be served.
        """
        is_given = is_dropped = False
        try:
            await self.deaths.check()
            self._check_retries()
            while not is_given and not is_stopped():
                is_given = await self._give(await self._place(), deliver, is_stopped)
            return is_given
        except asyncio.CancelledError:
            is_dropped = True  # the client reads no more
            raise
        finally:
            if not is_given:
                self._let_go()
                self.close(was_left=is_dropped or is_stopped())

    async def _give(self, placement: Placement, deliver: Deliver, is_stopped: Callable[[], bool]) -> bool:
        self.given_s = self._services.clock()
        self._services.ends.begins(self)
        try:
            await deliver(self.worker_id, self._message(placement))
        except (WorkerLostError, WorkerRefusedError) as error:
            if self.is_over:
                return True  # its worker has told more
            self._services.ends.over(self)  # until another worker has it
            self._withdraw(placement)
            if not is_stopped():
                lost = _as_lost(error, has_output=self.request.has_output)
                self._count_failure(lost)
                self._untaken += not (lost.has_died or lost.is_overloaded)
                self._check_retries()
            return False
        if self._kv_source is not None:
            self._withdraw(placement)  # a round that is resumed from another worker's KV does not queue
        return True

    def _check_retries(self) -> None:
        """A worker that never took the round was dead before, and there are only so many of them."""
        if self._record.retries - self._untaken > self._services.retries:
            text = f"{self._record.retries} workers failed this round; the last one: {self._last_error}"
            raise RoundRefusedError(UNAVAILABLE, text)

    async def _place(self) -> Placement:
        await self.history.find_fork()
        request, before, holder = self.request, self._placement, self.holder
        self.binding = before.binding if before else self.session.binding
        # A round in progress was admitted before, also by a coordinator that died.
        self.is_admitted = before is not None or request.has_output
        self.may_move = not (self.is_admitted or request.is_announcement)
        self.local_only = local_only(RESUMED if self._kv_source else None, request.uncarried)
        try:
            placement = await self._services.placer.place(self)
        except RoundRefusedError as error:
            raise self._unplaceable(error) from error
        self._record.is_initial |= placement.is_new_session
        self._placement = self._unreached = placement
        self._record.placed(placement.plan, placement.binding)
        self.holder = placement.plan.holder.worker_id if placement.plan.holder else holder
        log_placed(self._services.round_log, self._record)
        return placement

    def _unplaceable(self, error: RoundRefusedError) -> RoundRefusedError:
        """The error of a round that no worker takes. If one took it and was lost, the request is not at fault."""
        if not self.avoided or error.status == OVERLOADED or error.status >= _SERVER_ERROR:
            return error
        return RoundRefusedError(UNAVAILABLE, f"its worker was lost, and no other one can go on: {error}")

    def _message(self, placement: Placement) -> GenerateRequest:
        """The round for its decode worker. That worker calls the prefill worker of a remote round."""
        request, plan, now_s = self.request, placement.plan, self._services.clock()
        mark = request.continued_mark if request.continued_tokens else mark_of(plan.decode.fingerprint)
        message: GenerateRequest = {
            "task": encode_task(plan.task, now_s),
            "prompt": request.prompt,
            "source": self._source(self._kv_source or (plan.source.worker_id if plan.source else None)),
            "kept_tokens": self._record.kept_tokens,
            "request": request.engine_request,
            "start": {
                "request_id": self.request_id,
                "tell": self._services.ends.address,
                "age_s": now_s - self.arrival_s,
                "link": link(self._record.trace_id, request.client_prompt_tokens, mark),
                "prompt_tokens": request.client_prompt_tokens,
                "continued_tokens": request.continued_tokens,
                "record": self._record.as_dict() if request.wants_record else None,
            },
        }
        if not (placement.is_shared and self._services.access.view.connected):
            message["start"]["tells_begin"] = True
        if request.ends_session:
            message["ends_session"] = True
        if self._kv_source is not None:
            message["is_prefilled"] = True
        if plan.decision.route is Route.REMOTE and (prefill := self._source(plan.decision.worker_id)) is not None:
            message["start"]["prefill"] = prefill
        return message

    def _source(self, worker_id: str | None) -> Source | None:
        if worker_id is None:
            return None
        view = self._services.access.view.worker(worker_id)
        return (worker_id, view.parallelism.tp, view.parallelism.host) if view else (worker_id, None, "")

    # -- what workers tell

    def told(self, told: RoundEnded | PrefillFailed | Begun) -> None:
        """The decode worker says something of the round."""
        self._within.run(self._told, told)

    def _told(self, told: RoundEnded | PrefillFailed | Begun) -> None:
        self.was_answered = True
        self._sign.set()
        if isinstance(told, Begun):
            if told.has_output:
                self._reached()
        elif isinstance(told, PrefillFailed):
            self._prefill_failed(told)
        else:
            self._ended(told)

    def _prefill_failed(self, told: PrefillFailed) -> None:
        worker_id = told.worker_id
        if self._unreached is not None:
            self._withdraw(self._unreached)
        if told.status not in (0, UNAVAILABLE):
            self._record.retries += 1
            if told.status == OVERLOADED:
                self.avoided.add(worker_id)
        else:
            has_died = told.has_died and self._services.access.view.knows(worker_id)
            self._count_failure(
                WorkerLostError(worker_id, told.message, has_died=has_died, start=told.start, lives=told.lives)
            )
        record = self._record
        record.route, record.reason, record.prefill_worker = str(Route.LOCAL), told.reason, None
        log.warning("prefill of session %r failed, going on locally: %s", self.session_id, told.message)

    def _ended(self, ended: RoundEnded) -> None:
        self.end = ended
        record = self._record
        record.ttft_s, record.itl_s = ended.ttft_s, ended.itl_s
        record.output_tokens = self._before_tokens + len(ended.tokens) // TOKEN_BYTES
        record.is_complete = ended.outcome == "complete"
        if ended.prefill is not None:
            record.measures.prefilled(ended.prefill)
            self._take_report(record.prefill_worker or "", ended.prefill)
        if ended.decode is not None:
            is_read = bool(record.prefill_worker or self._kv_source)
            (record.measures.read_increment if is_read else record.measures.prefilled)(ended.decode)
            self._take_report(self.worker_id, ended.decode)
        if ended.has_begun:
            self._reached()
        if ended.outcome == "failed" and ended.goes_on:
            status, is_overloaded = ended.status, ended.status == OVERLOADED
            has_died = status == ENGINE_DIED
            self._lost_by(
                WorkerLostError(
                    self.worker_id, ended.message, has_died=has_died, start=ended.start, is_overloaded=is_overloaded
                )
            )
            return
        if ended.outcome == "failed":
            self._services.refused(ended.status, ended.message)
        self._let_go()
        self.close(was_left=ended.outcome == "left")

    def lost(self, error: WorkerLostError) -> None:
        """The worker does not go on with the round. The frontend sends it again."""
        self._within.run(self._lost_by, error)

    def _lost_by(self, error: WorkerLostError) -> None:
        if self._unreached is not None:
            self._withdraw(self._unreached)
        plan = self._placement.plan if self._placement else None
        if plan is not None and self._record.prefill_worker is not None:
            self._kv_source = plan.decision.worker_id
        self._count_failure(error)
        log.warning("a round of session %r was lost: %s", self.session_id, error)
        self._let_go(may_come_again=True)

    def _count_failure(self, error: WorkerLostError) -> None:
        """This round avoids the worker, unless only its connection broke. All rounds do if it may be dead."""
        self._record.retries += 1
        self._last_error = error
        if error.has_died:
            self.deaths.add(error)
        if error.lives:
            return
        self.avoided.add(error.worker_id)
        if not error.is_overloaded:
            self._services.placer.suspect(error.worker_id)

    def _take_report(self, worker_id: str, report: RoundReport) -> None:
        self._services.access.take_report(worker_id, self.session_id, report)

    # -- the end

    def _reached(self) -> None:
        """Output has come: the task has reached its worker, and its prefill is over."""
        if self._unreached is not None:
            self._take_out(self._unreached)
            self._unreached = None

    def _take_out(self, placement: Placement) -> None:
        """Take the task out of the local copy of its queue if no event of the store will."""
        view = self._services.access.view
        if not (placement.is_shared and view.connected):
            view.apply(TaskDone(placement.plan.decision.worker_id, placement.plan.task.task_id))

    def _withdraw(self, placement: Placement) -> None:
        """Take the task out of a queue that it may never have reached."""
        self._unreached = None
        self._take_out(placement)
        if placement.is_shared:
            self._services.spawn(
                self._services.access.finish_task(placement.plan.decision.worker_id, placement.plan.task.task_id)
            )

    def _let_go(self, *, may_come_again: bool = False) -> None:
        """No worker has the round any more."""
        if not self._over.is_set():
            self._over.set()
            self._sign.set()
            self._services.ends.over(self, may_come_again=may_come_again)
            self._services.ends.in_progress.end()

    def give_up(self) -> None:
        """The round was lost, and its frontend has not sent it again."""
        self._within.run(self._services.refused, UNAVAILABLE, f"its worker was lost: {self._last_error}")
        self._within.run(self.close)

    def close(self, *, was_left: bool = False) -> None:
        """The round is over for its client too: remember its session, and tell the observers."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._unreached is not None:
            self._withdraw(self._unreached)
        placement, request, services = self._placement, self.request, self._services
        if placement is None or request.is_announcement:
            services.branches.end(self._found, None)
            return  # an announcement has no latency to judge, and the next prompt goes on from the last round's context
        record, record.was_left = self._record, was_left
        record.lasted_s = services.clock() - self.arrival_s
        if request.ends_session:
            used = {placement.binding.worker_id, placement.plan.decision.worker_id, self._kv_source, self.holder}
            services.spawn(self._end_session({worker_id for worker_id in used | self.avoided if worker_id}))
        else:
            self._remember(placement, record)
        services.branches.end(self._found, placement.binding.worker_id)
        notify(services.observers, record)

    def _remember(self, placement: Placement, record: DecisionRecord) -> None:
        self._leave_history(placement, is_complete=record.is_complete)
        request, end = self.request, self.end
        has_begun = (end is not None and end.has_begun) or request.has_output
        self._services.sessions.remember(
            placement.binding,
            request.prompt + (end.tokens if end else b""),
            computed_tokens=None if has_begun else record.kept_tokens,
            prompt_tokens=request.prompt_tokens,
            missed=record.ttft_s is not None and not (record.ttft_met and record.itl_met),
            moved=bool(record.move_reason),
            holder=None if record.is_complete else self.holder,
            owner=SessionOwner(request.client_session_id or "", request.tenant, self._services.clock()),
            is_complete=record.is_complete,
        )

    def _leave_history(self, placement: Placement, *, is_complete: bool) -> None:
        """After the first round at a new owner the old one may drop its KV."""
        before, plan = self.holder, placement.plan
        if not before or not is_complete:
            return
        if drops_history(before, plan.decode.worker_id, plan.decision.worker_id):
            self._services.spawn(self._services.access.release(before, self.session_id))

    async def _end_session(self, used: set[str]) -> None:
        is_unbound = self.end is not None and not self.end.goes_on
        await self._services.end_session(self.session_id, self.request.tenant, used, is_unbound=is_unbound)


async def pipe(run: RoundRun, calls: WorkerCalls, context: CallContext, send: Send[Chunk]) -> None:
    """Give a round to its worker, and pass its chunks on as they come.

    Raises:
        RoundRefusedError: it cannot be served.
    """
    chunks: AsyncIterator[Chunk] | None = None

    async def deliver(worker_id: str, message: GenerateRequest) -> None:
        nonlocal chunks
        chunks = await calls.generate(worker_id, message, context)

    await run.give(deliver, context.is_stopped)
    if chunks is None:
        return
    try:
        async for chunk in chunks:
            send(chunk)
    except asyncio.CancelledError:
        context.stop_generating()  # nobody reads on, and a worker that says nothing would not notice it
        raise
    except Exception as error:
        if not context.is_stopped():
            await run.until_over(END_COMES_S)
            if run.end is None or run.end.outcome != "complete":
                send(_failure(run, error))


def _failure(run: RoundRun, error: Exception) -> Chunk:
    """The chunk for a stream that broke off: with the error that its worker told, or for the frontend to go on."""
    trace = tracing.current()
    status, message, again = UNAVAILABLE, f"its worker was lost: {one_line_of(error)}", True
    if (end := run.end) is not None and end.outcome == "failed":
        status, message, again = end.status, end.message, end.goes_on
    return error_chunk(status, trace.quoted(message) if trace else message, again=again)


def _as_lost(error: WorkerLostError | WorkerRefusedError, *, has_output: bool) -> WorkerLostError:
    """The failure of a call that no worker took.

    Raises:
        RoundRefusedError: the worker has refused the round, as every other one would.
    """
    if isinstance(error, WorkerLostError):
        return error
    if goes_on_elsewhere(error.status, has_output=has_output):
        return WorkerLostError(error.worker_id, str(error), is_overloaded=error.status == OVERLOADED)
    raise RoundRefusedError(error.status, str(error)) from None
