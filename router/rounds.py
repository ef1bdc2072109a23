"""One round from request to last token: place it, prefill it here or there, decode it, survive lost workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from ampd.page_keys import page_keys
from ampd.state.store import HeldChanged, StateUnavailableError
from ampd.telemetry import tracing
from ampd.telemetry.logs import RoundLog
from ampd.types import Route, WorkerView
from ampd.wire import REPORT_KEY, GenerateRequest, PrefillRequest, RoundReport, encode_task
from router.calls import CallContext, LinkedContexts, WorkerCalls, worker_error
from router.errors import RequestError, WorkerLostError, WorkerRefusedError
from router.guard import StreamGuard
from router.outputs import Chunk, continued_request, ends_at_prefill, first_chunk, merged_usage
from router.placement import Ask, Placement, Placer
from router.record import DecisionRecord
from router.request import Round
from router.round_log import log_placed
from router.served import Observer, ServedRound, tell
from router.sessions import Overlap, SessionMemory, pack_tokens

log = logging.getLogger(__name__)

_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class Services:
    """What all rounds of a coordinator share.

    Attributes:
        policy: name of the routing policy, for the record.
        retries: lost workers that a round survives.
        page_size: tokens per KV page of the workers.
        spawn: starts work that outlives the round.
        observers: are told of each round at its end.
        round_log: what is logged of rounds that go well.
    """

    placer: Placer
    calls: WorkerCalls
    sessions: SessionMemory
    guard: StreamGuard
    clock: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    policy: str
    retries: int
    page_size: int
    call_timeout_s: float
    observers: tuple[Observer, ...] = ()
    round_log: RoundLog = RoundLog.END


class RoundRun:
    """The life of one round. `serve` yields Dynamo's chunks; whatever happens, nothing is left behind after it."""

    def __init__(self, one: Round, context: CallContext, services: Services) -> None:
        self._one = one
        self._context = context
        self._services = services
        self._clock = services.clock
        self._arrival_s = services.clock()
        self._links = LinkedContexts(context)
        self._prompt = pack_tokens(one.token_ids)
        self._overlap = services.sessions.overlap(one.session_id, self._prompt) if one.is_named else Overlap()
        trace = tracing.current()
        self._record = DecisionRecord(
            session_id=one.session_id,
            policy=services.policy,
            request_id=trace.request_id if trace else context.id(),
            trace_id=trace.trace_id if trace else None,
        )
        self._record.rewritten = self._overlap.is_rewritten
        self._placement: Placement | None = None
        self._entered: Placement | None = None
        self._emitted: list[int] = []
        self._finished = 0
        self._is_initial = False
        self._is_dropped = False
        self._last_s = self._arrival_s
        self._lost: set[str] = set()
        self._forced_local: str | None = None
        self._source: str | None = None
        self._cached_tokens: int | None = None

    async def serve(self) -> AsyncGenerator[Chunk, None]:
        """Run the round.

        Raises:
            RequestError: it cannot be served.
        """
        try:
            while not self._context.is_stopped():
                placement = await self._place()
                if placement.decision.route is Route.REMOTE:
                    chunk = await self._prefill(placement)
                    if chunk is None:
                        continue
                    yield chunk
                    if self._finished:
                        self._hand_over(placement)
                        return
                try:
                    async for chunk in self._decode(placement):
                        yield chunk
                    return
                except WorkerLostError as error:
                    self._survive(error)
        except (GeneratorExit, asyncio.CancelledError):
            self._is_dropped = True  # nobody reads it any more
            raise
        finally:
            self._close()

    # -- where it goes

    async def _place(self) -> Placement:
        one, held = self._one, self._placement
        local_only = self._forced_local
        if local_only is None and one.local_only is not None:
            local_only = f"cannot-carry-{one.local_only.replace('_', '-')}"
        placement = await self._services.placer.place(
            Ask(
                session_id=one.session_id,
                prompt_tokens=len(one.token_ids) + len(self._emitted),
                slo=one.slo,
                arrival_s=self._arrival_s,
                hist_tokens=self._history_at,
                local_only=local_only,
                binding=held.binding if held else self._services.sessions.binding(one.session_id),
                lost=self._lost,
                session_missed=self._services.sessions.has_missed(one.session_id),
            )
        )
        self._is_initial = self._is_initial or placement.is_new_session
        self._placement = placement
        self._entered = placement if placement.is_shared else None
        task = placement.task
        self._record.decided(
            placement.decision, placement.binding.worker_id, placement.binding.epoch, task.hist_tokens, task.incr_tokens
        )
        log_placed(self._services.round_log, self._record, one.slo)
        return placement

    async def _history_at(self, decode: WorkerView) -> int:
        """How much of the prompt's KV the decode worker has: what it says it holds, as far as the prompt still fits."""
        held = decode.held_tokens.get(self._one.session_id, 0)
        overlap = self._overlap
        if overlap.common_tokens >= held or overlap.is_rewritten:
            return min(overlap.common_tokens, held)
        # The worker holds more than this replica knows of: another replica served the session.
        keys = page_keys(self._one.token_ids, self._services.page_size)
        try:
            reply = await self._services.calls.kv(
                decode.worker_id, {"op": "match", "keys": keys}, self._services.call_timeout_s
            )
        except (WorkerLostError, WorkerRefusedError) as error:
            log.warning("%s; counting on the %d tokens known here", error, overlap.common_tokens)
            return overlap.common_tokens
        matched = reply.get("matched", 0) * self._services.page_size
        self._record.rewritten = matched < min(held, len(keys) * self._services.page_size)
        return min(matched, held)

    # -- prefill elsewhere

    async def _prefill(self, placement: Placement) -> Chunk | None:
        """The first token, from a prefill worker; None if that worker failed or the client has gone."""
        worker_id = placement.decision.worker_id
        request: PrefillRequest = {
            "task": encode_task(placement.task, self._clock()),
            "token_ids": self._one.token_ids + self._emitted,
            "source_worker_id": placement.binding.worker_id if placement.task.hist_tokens else None,
            "request": self._engine_request(),
        }
        context = self._links.new()
        try:
            with self._services.guard.watch(worker_id, context):
                stream = await self._services.calls.prefill(worker_id, request, context)
                self._entered = None
                async for chunk in stream:
                    if chunk.get("token_ids"):
                        return self._first(placement, chunk)
            raise WorkerLostError(worker_id, "the prefill ended without a token")
        except Exception as error:
            self._prefill_failed(placement, worker_error(worker_id, error))
            return None

    def _first(self, placement: Placement, chunk: Chunk) -> Chunk:
        report: RoundReport | None = chunk.get(REPORT_KEY)
        if report is not None:
            self._record.prefilled(report)
            self._record.read_history(report)
            self._heard(placement.decision.worker_id, report)
            if not self._emitted:
                self._cached_tokens = report["cached_tokens"]
        one, before = self._one, len(self._emitted)
        reason = ends_at_prefill(
            chunk,
            one.stop_token_ids,
            None if one.max_tokens is None else one.max_tokens - before,
            one.min_tokens - before,
            len(one.token_ids) + before,
            placement.decode.max_context_tokens,
        )
        self._source = placement.decision.worker_id
        out = first_chunk(chunk)
        self._saw(out)
        if reason is not None:
            out["finish_reason"] = reason
            if chunk.get("stop_reason") is not None:
                out["stop_reason"] = chunk["stop_reason"]
            self._finish(out, None, len(self._emitted))
        return out

    def _prefill_failed(self, placement: Placement, error: Exception) -> None:
        if self._context.is_stopped():
            return
        worker_id = placement.decision.worker_id
        if isinstance(error, WorkerRefusedError) and error.status != _UNAVAILABLE:
            self._forced_local = "prefill-worker-refused"
        elif isinstance(error, (WorkerLostError, WorkerRefusedError)):
            self._forced_local = "prefill-worker-lost"
            self._services.placer.suspect(worker_id)
            self._lost.add(worker_id)
        else:
            raise error
        self._record.retries += 1
        self._withdraw(placement)
        log.warning("prefill of session %r failed, going on locally: %s", self._one.session_id, error)

    def _hand_over(self, placement: Placement) -> None:
        """The round ended with its first token: let the decode worker take the KV over for the next round."""
        if self._one.ends_session:
            return
        engine_request = dict(self._engine_request())
        engine_request["stop_conditions"] = {**(engine_request.get("stop_conditions") or {}), "max_tokens": 0}
        request = self._generate_request(placement, engine_request)
        context = self._context.detached(placement.task.task_id)
        self._services.spawn(self._take_over(placement.binding.worker_id, request, context))

    async def _take_over(self, worker_id: str, request: GenerateRequest, context: CallContext) -> None:
        try:
            async for chunk in await self._services.calls.generate(worker_id, request, context):
                if report := chunk.get(REPORT_KEY):
                    self._heard(worker_id, report)
        except Exception as error:
            log.warning("KV of session %r was not taken over: %s", self._one.session_id, worker_error(worker_id, error))

    # -- decode

    async def _decode(self, placement: Placement) -> AsyncGenerator[Chunk, None]:
        """The rest of the round, from its decode worker."""
        worker_id, services = placement.binding.worker_id, self._services
        before = len(self._emitted)
        context = self._links.new()
        try:
            with services.guard.watch(worker_id, context) as stream:
                request = self._generate_request(placement, self._engine_request())
                chunks = await services.calls.generate(worker_id, request, context)
                self._entered = None
                if self._source is not None and placement.decision.route is Route.LOCAL:
                    self._withdraw(placement)  # a round that is resumed from another worker's KV does not queue
                async for chunk in chunks:
                    report = chunk.pop(REPORT_KEY, None)
                    self._saw(chunk)
                    if chunk.get("finish_reason") is not None:
                        if report is not None:
                            self._decoded(placement, report)
                        self._finish(chunk, report, before)
                    yield chunk
                    stream.waits()
        except Exception as error:
            self._decode_failed(placement, worker_error(worker_id, error))
        if self._finished < self._one.choices and not self._context.is_stopped():
            raise WorkerLostError(worker_id, "its stream ended before the round did")

    def _decoded(self, placement: Placement, report: RoundReport) -> None:
        if self._source is None:
            self._record.prefilled(report)
        else:
            self._record.read_increment(report)
        self._heard(placement.binding.worker_id, report)

    def _decode_failed(self, placement: Placement, error: Exception) -> None:
        if isinstance(error, WorkerRefusedError):
            if error.status != _UNAVAILABLE:
                raise RequestError(error.status, str(error)) from None
            raise WorkerLostError(placement.binding.worker_id, str(error)) from None
        raise error

    def _survive(self, error: WorkerLostError) -> None:
        """Make ready to go on at another decode worker.

        Raises:
            RequestError: it cannot be.
        """
        one, services = self._one, self._services
        services.placer.suspect(error.worker_id)
        self._lost.add(error.worker_id)
        self._record.retries += 1
        assert self._placement is not None
        self._withdraw(self._placement)
        if self._record.retries > services.retries:
            raise RequestError(_UNAVAILABLE, f"{self._record.retries} workers failed this round; the last one: {error}")
        if self._emitted and one.local_only is not None:
            raise RequestError(
                _UNAVAILABLE,
                f"the decode worker was lost after {len(self._emitted)} tokens, and a request with {one.local_only} "
                f"cannot be continued elsewhere; send it again ({error})",
            )
        # A prefill worker of this round still has the whole context: the next decode worker reads it from there.
        if self._source in self._lost:
            self._source = None
        self._forced_local = "resumed" if self._source else None
        log.warning("session %r goes on elsewhere after %d tokens: %s", one.session_id, len(self._emitted), error)

    # -- chunks

    def _saw(self, chunk: Chunk) -> None:
        """Take note of a chunk's tokens."""
        token_ids = chunk.get("token_ids")
        if not token_ids:
            return
        now_s = self._clock()
        if not chunk.get("index"):
            self._emitted += token_ids
            self._last_s = now_s
        if self._record.ttft_s is None:
            self._record.ttft_s = now_s - self._arrival_s
            if self._one.wants_record:
                self._attach(chunk)

    def _finish(self, chunk: Chunk, report: RoundReport | None, before: int) -> None:
        """The end of a choice: its counts, and with the last one the record. `before`: tokens out before this call."""
        self._finished += 1
        usage: Mapping[str, Any] | None = chunk.get("completion_usage")
        if before or self._cached_tokens is not None:
            completion_tokens = before + ((usage or {}).get("completion_tokens") or 0)
            chunk["completion_usage"] = merged_usage(
                usage, len(self._one.token_ids), completion_tokens, self._cached_tokens
            )
        if self._one.wants_record and (report is not None or self._finished >= self._one.choices):
            self._attach(chunk)

    def _attach(self, chunk: Chunk) -> None:
        chunk["engine_data"] = {**(chunk.get("engine_data") or {}), REPORT_KEY: self._record.as_dict()}

    def _heard(self, worker_id: str, report: RoundReport) -> None:
        """A worker's word on what it holds and still decodes, before the store repeats it.

        An agent without a tool to run sends its next round within milliseconds: its last one decodes no more.
        """
        view = self._services.placer.view
        view.apply(HeldChanged(worker_id, self._one.session_id, report["held_tokens"]))
        if "decode_batch" in report:
            view.decoding(worker_id, report["decode_batch"], report["decode_context_tokens"])

    # -- messages

    def _generate_request(self, placement: Placement, engine_request: dict[str, Any]) -> GenerateRequest:
        return {
            "task": encode_task(placement.task, self._clock()),
            "token_ids": self._one.token_ids + self._emitted,
            "source_worker_id": self._source,
            "request": engine_request,
        }

    def _engine_request(self) -> dict[str, Any]:
        if not self._emitted:
            return self._one.engine_request
        return continued_request(self._one.engine_request, len(self._emitted))

    # -- the end

    def _withdraw(self, placement: Placement) -> None:
        """Take the task out of a queue that it may never have reached."""
        self._entered = None
        if placement.is_shared:
            self._services.spawn(self._finish_task(placement.decision.worker_id, placement.task.task_id))

    async def _finish_task(self, worker_id: str, task_id: str) -> None:
        try:
            await self._services.placer.store.finish_task(worker_id, task_id)
        except StateUnavailableError as error:
            log.debug("task %s stays entered until it expires: %s", task_id, error)

    def _close(self) -> None:
        self._links.close()
        if self._entered is not None:
            self._withdraw(self._entered)
        placement, one = self._placement, self._one
        if placement is None:
            return
        served = self._served()
        if one.ends_session:
            self._services.spawn(self._release(placement))
        else:
            context = self._prompt + pack_tokens(self._emitted)
            missed = served.ttft_s is not None and not (served.ttft_met and served.itl_met)
            self._services.sessions.remember(placement.binding, context, missed=missed)
        tell(self._services.observers, served)

    def _served(self) -> ServedRound:
        """The round as far as it came."""
        ttft_s, gaps = self._record.ttft_s, len(self._emitted) - 1
        itl_s = (self._last_s - self._arrival_s - ttft_s) / gaps if ttft_s is not None and gaps > 0 else None
        return ServedRound(
            self._record,
            self._one.slo,
            is_initial=self._is_initial,
            is_complete=self._finished >= self._one.choices,
            ttft_s=ttft_s,
            itl_s=itl_s,
            output_tokens=len(self._emitted),
            was_left=self._is_dropped or self._context.is_stopped(),
            lasted_s=self._clock() - self._arrival_s,
        )

    async def _release(self, placement: Placement) -> None:
        extra = {placement.binding.worker_id, placement.decision.worker_id, self._source} - {None}
        await release_session(self._services, self._one.session_id, {worker for worker in extra if worker})


async def release_session(services: Services, session_id: str, used: set[str]) -> None:
    """End a session everywhere: its binding, what is remembered of it, and its KV on every worker that holds some."""
    services.sessions.forget(session_id)
    placer = services.placer
    try:
        bound = await placer.store.end_session(session_id)
    except StateUnavailableError as error:
        bound = None
        log.warning("session %r stays bound until it expires: %s", session_id, error)
    views = (*placer.view.decode(), *placer.view.prefill())
    workers = used | {view.worker_id for view in views if session_id in view.held_tokens}
    if bound is not None:
        workers.add(bound.worker_id)
    for worker_id in workers:
        try:
            await services.calls.kv(
                worker_id, {"op": "release_session", "session_id": session_id}, services.call_timeout_s
            )
        except (WorkerLostError, WorkerRefusedError) as error:
            log.info("session %r was not released at once: %s", session_id, error)
