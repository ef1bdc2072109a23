"""One round from request to last token: place it, prefill it here or there, decode it, survive lost workers."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from ampd.handler_stream import Chunk, Send
from ampd.serving.moves import drops_history
from ampd.state.store import TaskDone
from ampd.telemetry import tracing
from ampd.types import Route
from ampd.wire import REPORT_KEY, GenerateRequest, PrefillRequest, RoundReport
from router.calls import CallContext, LinkedContexts, worker_error
from router.client_stream import ClientStream
from router.decision_record import DecisionRecord, RoundFacts
from router.outputs import ends_at_prefill, first_chunk
from router.placement import Placement
from router.prompt_history import PromptHistory
from router.recovery import Recovery, decode_error
from router.request import RoundRequest
from router.round_errors import RoundRefusedError, WorkerLostError
from router.round_log import log_placed
from router.served import notify
from router.services import Services
from router.session_memory import SessionOwner, pack_tokens
from router.unplaced_round import MovingSession, UnplacedRound
from router.worker_chunks import check_chunk
from router.worker_deaths import RequestDeaths
from router.worker_requests import generate_request, prefill_request, take_over_request

log = logging.getLogger(__name__)


class RoundRun:
    """The life of one round. `serve` sends Dynamo's chunks; however it ends, no call and no queued task stays behind.

    `_unreached` is the placement whose task may not have reached its worker, because no output of it has come yet. It
    must be withdrawn if the round ends. A worker does not begin a call whose client has gone already.
    """

    def __init__(self, request: RoundRequest, context: CallContext, services: Services) -> None:
        self._request = request
        self._context = context
        self._services = services
        self._links = LinkedContexts(context)
        options = services.options
        self._record = _new_record(request, context, options.policy)
        self._history = PromptHistory(
            request, self._record, services.sessions, services.access, options.page_size_tokens, services.prefixes
        )
        self._stream = ClientStream(request, self._record, services.clock)
        self._deaths = RequestDeaths(services.deaths, request)
        self._recovery = Recovery(request, self._record, services.placer, options.retries, self._deaths)
        self._recovery.holder = services.sessions.holder(request.session_id)
        self._placement: Placement | None = None
        self._unreached: Placement | None = None
        self._is_initial = False
        self._is_dropped = False

    async def serve(self, send: Send[Chunk]) -> None:
        """Run the round, and send its chunks.

        Raises:
            RoundRefusedError: it cannot be served.
        """
        try:
            while not self._context.is_stopped():
                placement = await self._place()
                if placement.plan.decision.route is Route.REMOTE:
                    chunk = await self._prefill(placement)
                    if chunk is None:
                        continue
                    send(chunk)
                    if self._stream.has_finished_choice:
                        self._hand_over(placement)
                        return
                try:
                    await self._decode(placement, send)
                    return
                except WorkerLostError as error:
                    if self._context.is_stopped():
                        return  # the client has gone, which says nothing about the worker
                    self._withdraw(placement)
                    has_begun = self._stream.has_begun
                    await self._recovery.after_decode(error, len(self._stream.emitted), has_begun=has_begun)
        except asyncio.CancelledError:
            self._is_dropped = True  # the client reads no more
            self._links.stop()
            raise
        finally:
            self._close()

    async def _place(self) -> Placement:
        placing = asyncio.create_task(self._services.placer.place(self._unplaced()))
        try:
            placement = await asyncio.shield(placing)
        except asyncio.CancelledError:
            self._services.spawn(self._give_back(placing))
            raise
        except RoundRefusedError as error:
            raise self._recovery.unplaced(error) from error
        self._is_initial = self._is_initial or placement.is_new_session
        self._placement = placement
        self._services.access.undeleted.pop(self._request.session_id, None)
        self._stream.placed(placement.plan.decode)
        self._unreached = placement
        self._record.placed(placement.plan, placement.binding)
        self._recovery.holder = placement.plan.holder.worker_id if placement.plan.holder else self._recovery.holder
        log_placed(self._services.options.round_log, self._record)
        return placement

    def _unplaced(self) -> UnplacedRound:
        request, sessions = self._request, self._services.sessions
        return UnplacedRound(
            session_id=request.session_id,
            tenant=request.tenant,
            prompt_tokens=len(request.token_ids) + len(self._stream.emitted),
            slo=request.slo,
            arrival_s=self._stream.waits_since_s,
            has_output=self._stream.has_output,
            hist_tokens=self._history.held_by,
            shared_tokens=self._history.shared,
            local_only=self._recovery.local_only,
            binding=self._placement.binding if self._placement else sessions.binding(request.session_id),
            lost=self._recovery.lost,
            fingerprint_mark=self._stream.fingerprint_mark,
            ends_session=request.ends_session,
            prompt_digest=self._deaths.prompt_digest,
            session_missed=sessions.has_missed(request.session_id),
            # A round in progress was admitted before, also by a coordinator that died.
            is_admitted=self._placement is not None or request.continued_tokens > 0,
            moving=MovingSession(
                may_move=self._placement is None and not (request.is_announcement or request.continued_tokens),
                moved_s=sessions.moved_s(request.session_id),
                holder=self._recovery.holder,
            ),
        )

    async def _give_back(self, placing: asyncio.Task[Placement]) -> None:
        """Undo a placement whose client left while it was made, because the shared state may have it already."""
        with suppress(RoundRefusedError):
            self._withdraw(await placing)
            if self._request.ends_session:
                await self._end_session(set())

    # -- prefill elsewhere

    async def _prefill(self, placement: Placement) -> Chunk | None:
        """The first token, from a prefill worker; None if that worker failed or the client has gone."""
        worker_id, access = placement.plan.decision.worker_id, self._services.access
        context = self._links.new()
        has_begun = False
        try:
            with access.guard.watch(worker_id, context):
                # Nothing keeps the request here while the prefill waits: its list of token ids is large.
                chunks = await access.calls.prefill(worker_id, self._prefill_request(placement), context)
                has_begun = True
                async for chunk in chunks:
                    self._reached()
                    check_chunk(worker_id, chunk, self._request.choices)
                    if chunk.get("token_ids"):
                        return self._first(placement, chunk)
            raise WorkerLostError(worker_id, "the prefill ended without a token")
        except Exception as error:
            context.stop_generating()  # a worker with malformed chunks may go on
            if not self._context.is_stopped():
                self._withdraw(placement)
                failure = await access.failure(worker_id, error, has_begun=has_begun)
                await self._recovery.after_prefill(failure, has_output=self._stream.has_output)
            return None

    def _prefill_request(self, placement: Placement) -> PrefillRequest:
        return prefill_request(
            self._request, self._stream.emitted, placement, self._services.clock(), kept_tokens=self._record.kept_tokens
        )

    def _first(self, placement: Placement, chunk: Chunk) -> Chunk:
        """The prefill worker's chunk as the first of the round, or its last, if the round ends with this token."""
        request, emitted_tokens = self._request, len(self._stream.emitted)
        report = self._services.access.reports.of(chunk, placement.plan.decision.worker_id)
        if report is not None:
            self._record.prefilled(report)
            self._take_report(placement.plan.decision.worker_id, report)
            if not emitted_tokens:
                self._stream.prefilled_cached_tokens = report["cached_tokens"]
        reason = ends_at_prefill(
            chunk,
            request.stop_token_ids,
            None if request.max_tokens is None else request.max_tokens - emitted_tokens,
            request.min_tokens - emitted_tokens,
            len(request.token_ids) + emitted_tokens,
            placement.plan.decode.max_context_tokens,
        )
        self._recovery.kv_source = placement.plan.decision.worker_id
        out = first_chunk(chunk)
        self._stream.count(out)
        if reason is not None:
            out["finish_reason"] = reason
            if chunk.get("stop_reason") is not None:
                out["stop_reason"] = chunk["stop_reason"]
            self._stream.finish_choice(out, len(self._stream.emitted), has_report=False)
        return out

    def _hand_over(self, placement: Placement) -> None:
        """The round ended with its first token: let the decode worker take the KV over for the next round."""
        if self._request.ends_session:
            return
        self._services.spawn(self._take_over(placement, self._context.detached(placement.plan.task.task_id)))

    def _generate_request(self, placement: Placement) -> GenerateRequest:
        """To the decode worker, which reads the KV of the context from the prefill worker that has it."""
        source, now_s = self._recovery.kv_source, self._services.clock()
        holder = self._services.access.view.worker(source) if source else None
        tp = holder.parallelism.tp if holder else None
        return generate_request(
            self._request,
            self._stream.emitted,
            placement,
            source,
            now_s,
            kept_tokens=self._record.kept_tokens,
            source_tp=tp,
        )

    async def _take_over(self, placement: Placement, context: CallContext) -> None:
        worker_id, access = placement.binding.worker_id, self._services.access
        try:
            with access.guard.watch(worker_id, context) as watched:
                request = take_over_request(self._generate_request(placement))
                async for chunk in await access.calls.generate(worker_id, request, context):
                    if report := access.reports.of(chunk, worker_id):
                        self._take_report(worker_id, report)
                    watched.answered()
        except Exception as error:
            reason = worker_error(worker_id, error)
            log.warning("KV of session %r was not taken over: %s", self._request.session_id, reason)

    # -- decode

    async def _decode(self, placement: Placement, send: Send[Chunk]) -> None:
        """Send the rest of the round, from its decode worker."""
        worker_id, access = placement.binding.worker_id, self._services.access
        source, tokens_before = self._recovery.kv_source, len(self._stream.emitted)
        context = self._links.new()
        has_begun = False
        try:
            with access.guard.watch(worker_id, context) as watched:
                chunks = await access.calls.generate(worker_id, self._generate_request(placement), context)
                has_begun = True
                if source is not None and placement.plan.decision.route is Route.LOCAL:
                    self._withdraw(placement)  # a round that is resumed from another worker's KV does not queue
                async for chunk in chunks:
                    self._reached()
                    watched.answered()
                    check_chunk(worker_id, chunk, self._request.choices)
                    self._stream.count(chunk)
                    if "finish_reason" in chunk or REPORT_KEY in chunk:
                        self._finish(chunk, worker_id, source, tokens_before)
                    send(chunk)
        except Exception as error:
            context.stop_generating()  # as in `_prefill`
            if self._stream.is_complete:
                return  # the client has all of it, and another worker would add to it
            failure = await access.failure(worker_id, error, has_begun=has_begun and not self._context.is_stopped())
            raise decode_error(failure, has_output=self._stream.has_output) from None
        if not self._stream.is_complete and not self._context.is_stopped():
            raise WorkerLostError(worker_id, "its stream ended before the round did")

    def _finish(self, chunk: Chunk, worker_id: str, source: str | None, tokens_before: int) -> None:
        """Complete the last chunk of a choice."""
        report = self._services.access.reports.of(chunk, worker_id)
        chunk.pop(REPORT_KEY, None)
        if chunk.get("finish_reason") is not None:
            if report is not None:
                self._decoded(worker_id, source, report)
            self._stream.finish_choice(chunk, tokens_before, has_report=report is not None)

    def _decoded(self, worker_id: str, source: str | None, report: RoundReport) -> None:
        if source is None:
            self._record.prefilled(report)
        else:
            self._record.read_increment(report)
        self._take_report(worker_id, report)

    def _take_report(self, worker_id: str, report: RoundReport) -> None:
        self._services.access.take_report(worker_id, self._request.session_id, report)

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

    def _close(self) -> None:
        self._links.close()
        if self._unreached is not None:
            self._withdraw(self._unreached)
        placement, request, services = self._placement, self._request, self._services
        if placement is None:
            return
        was_left = self._is_dropped or self._context.is_stopped()
        if request.is_announcement:
            return  # it has no latency to judge, and the next round's prompt goes on from the last round's context
        served = self._stream.served(is_initial=self._is_initial, was_left=was_left)
        if request.ends_session:
            used = {placement.binding.worker_id, placement.plan.decision.worker_id, self._recovery.kv_source}
            used |= {self._recovery.holder, *self._recovery.lost}
            services.spawn(self._end_session({worker_id for worker_id in used if worker_id}))
        else:
            self._leave_history(placement)
            context = request.prompt + pack_tokens(self._stream.emitted)
            missed = served.ttft_s is not None and not (served.ttft_met and served.itl_met)
            owner = SessionOwner(request.client_session_id or "", request.tenant, services.clock())
            computed = None if self._stream.has_begun else self._record.kept_tokens
            services.sessions.remember(
                placement.binding,
                context,
                computed_tokens=computed,
                missed=missed,
                moved=bool(self._record.move_reason),
                holder=None if self._stream.is_complete else self._recovery.holder,
                owner=owner,
            )
        notify(services.observers, served)

    def _leave_history(self, placement: Placement) -> None:
        """After the first round at a new owner the old one may drop its KV."""
        before, plan = self._recovery.holder, placement.plan
        if not before or not self._stream.is_complete:
            return
        if drops_history(before, plan.decode.worker_id, plan.decision.worker_id):
            self._services.spawn(self._services.access.leave_session(before, self._request.session_id))

    async def _end_session(self, used: set[str]) -> None:
        await self._services.end_session(self._request.session_id, self._request.tenant, used)


def _new_record(request: RoundRequest, context: CallContext, policy: str) -> DecisionRecord:
    trace = tracing.current()
    facts = RoundFacts(
        session_id=request.client_session_id or request.session_id,
        session_key=request.session_id,
        policy=policy,
        request_id=trace.request_id if trace else context.id(),
        trace_id=trace.trace_id if trace else None,
        ttft_target_s=request.slo.ttft_s,
        itl_target_s=request.slo.itl_s,
        clamped_targets=request.clamped_targets,
    )
    return DecisionRecord(facts)
