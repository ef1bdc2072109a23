"""The rounds of clients that this worker answers: their prefill elsewhere, their chunks, their end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

from dynamo.runtime import Context

from ampd.background_tasks import BackgroundTasks, RoundsInProgress
from ampd.errors import one_line_of
from ampd.handler_stream import Chunk, Send, StopSignal
from ampd.keys import pack_tokens
from ampd.round_end import Begun, PrefillFailed, RoundEnded, error_chunk, goes_on_elsewhere
from ampd.serving.local_only import PREFILL_WORKER_LOST, PREFILL_WORKER_REFUSED
from ampd.telemetry import tracing
from ampd.wire import (
    ENGINE_DIED,
    OVERLOADED,
    GenerateRequest,
    PrefillRequest,
    Source,
    engine_start,
    parse_error,
)
from workers.call_guard import CallRefusedError
from workers.client_stream import ClientStream, ends_at_prefill, grouped, signs_of_life
from workers.engines.base import EngineError
from workers.peers import DynamoPeers
from workers.round_ends import RoundEnds
from workers.round_service import RoundService
from workers.session_releaser import SessionEnds

log = logging.getLogger(__name__)

SILENT_S = 10.0
"""A prefill worker that is silent for so long is asked whether it lives."""


class ClientRounds:
    """Answers clients.

    Args:
        worker_id: this worker, for the logs of others.
        stream_tokens: tokens that are sent together.
        context_limit: longest context of this worker; 0: it is not known.
    """

    def __init__(
        self,
        worker_id: str,
        rounds: RoundService,
        prefills: DynamoPeers,
        ends: RoundEnds,
        sessions: SessionEnds,
        stream_tokens: int = 1,
        context_limit: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker_id = worker_id
        self._rounds = rounds
        self._prefills = prefills
        self._ends = ends
        self._sessions = sessions
        self._stream_tokens = stream_tokens
        self._context_limit = context_limit
        self._clock = clock
        self._background = BackgroundTasks()
        self._in_progress = RoundsInProgress()

    async def drained(self) -> None:
        """Wait until no round is in progress."""
        await self._in_progress.drained()
        await self._rounds.drained()

    async def serve(self, request: GenerateRequest, context: StopSignal, send: Send[Chunk]) -> None:
        """Answer one round. A round that fails ends with an `error_chunk`."""
        stream, start = ClientStream(request, self._clock), request["start"]
        self._sessions.begins(request["task"]["session_id"])
        self._ends.begins(start["tell"], start["request_id"])
        with self._in_progress.round():
            try:
                with signs_of_life(send) as send_alive:
                    await self._send(request, stream, context, send_alive)
            finally:
                if not stream.is_told:
                    self._tell_end(request, stream.ended("left"))

    async def _send(
        self, request: GenerateRequest, stream: ClientStream, context: StopSignal, send: Send[Chunk]
    ) -> None:
        try:
            # An error comes after the tokens before it, so that no more than necessary is computed again.
            with grouped(send, self._stream_tokens, request["task"]["slo"]["itl_s"]) as send_grouped:
                if not context.is_stopped():
                    await self._run(request, stream, send_grouped)
            if not stream.is_complete and not context.is_stopped():
                raise EngineError("its stream ended before the round did", ENGINE_DIED)
        except Exception as error:
            if stream.is_complete or context.is_stopped():
                return  # the client has all of it, or reads no more
            self._fail(request, stream, error, send)

    def _fail(self, request: GenerateRequest, stream: ClientStream, error: Exception, send: Send[Chunk]) -> None:
        status, message = _explained(error)
        goes_on = goes_on_elsewhere(status, has_output=stream.has_output)
        trace = tracing.current()
        told = stream.ended("failed", status=status, message=message, goes_on=goes_on, start=engine_start(message))
        self._tell_end(request, told)
        send(error_chunk(status, trace.quoted(message) if trace else message, again=goes_on))

    async def _run(self, request: GenerateRequest, stream: ClientStream, send: Send[Chunk]) -> None:
        start, began_s = request["start"], self._clock()

        def pass_on(chunk: Chunk) -> None:
            """Tell the coordinator before the client, whose next request may come at once."""
            if stream.is_complete:
                self._tell_end(request, stream.ended("complete"))
            elif start.get("tells_begin") and stream.has_begun:
                start["tells_begin"] = False
                self._ends.tell(start["tell"], Begun(start["request_id"], has_output=True))
            send(chunk)

        if (prefill := start.get("prefill")) is not None:
            chunk = await self._first_token(prefill[0], request, stream)
            self._was_waiting(request, began_s)
            if chunk is not None:
                reason = ends_at_prefill(chunk, request, self._context_limit)
                request = _taken_over(request, prefill, chunk["token_ids"])
                pass_on(stream.prefilled(chunk, reason))
                if stream.is_complete:
                    self._background.spawn(self._after_prefill(request))
                    return
        await self._rounds.generate(request, lambda chunk: pass_on(stream.decoded(chunk)))

    def _tell_end(self, request: GenerateRequest, ended: RoundEnded) -> None:
        """A round that goes on elsewhere ends no session."""
        self._ends.tell(request["start"]["tell"], ended)
        if request.get("ends_session") and not ended.goes_on:
            self._sessions.ended(request["task"]["session_id"], request.get("epoch", 0))

    def _was_waiting(self, request: GenerateRequest, since_s: float) -> None:
        """Times in a message count from when it was sent."""
        task = request["task"]
        request["task"] = {**task, "arrival_s": task["arrival_s"] - (self._clock() - since_s)}

    # -- the prefill worker

    async def _first_token(self, worker_id: str, request: GenerateRequest, stream: ClientStream) -> Chunk | None:
        """The first token, from a prefill worker; None: that worker failed, and this one prefills.

        Raises:
            EngineError: the round ends, because the prefill worker has too much to do.
        """
        context = tracing.context_for_call(self._worker_id) or Context()
        message: PrefillRequest = {
            "task": request["task"],
            "prompt": request["prompt"],
            "source": request["source"],
            "kept_tokens": request.get("kept_tokens", 0),
            "request": request["request"],
        }
        has_begun = False
        try:
            chunks = await self._prefills.prefill(worker_id, message, context)
            has_begun = True
            while (chunk := await self._next(worker_id, chunks)) is not None:
                if chunk.get("token_ids"):
                    return chunk
            raise ConnectionError("the prefill ended without a token")
        except asyncio.CancelledError:
            context.stop_generating()
            raise
        except Exception as error:
            context.stop_generating()  # a worker that is silent may go on
            failed = await self._failed(request["start"]["request_id"], worker_id, error, has_begun=has_begun)
        if failed.status == OVERLOADED and not stream.has_output:
            # Another worker would take on what this one cannot, at the cost of rounds that are on time.
            raise EngineError(failed.message, OVERLOADED)
        self._ends.tell(request["start"]["tell"], failed)
        stream.prefill_failed(failed.reason)
        log.warning("a prefill failed, and is done here: worker %s: %s", worker_id, failed.message)
        return None

    async def _next(self, worker_id: str, chunks: AsyncIterator[Chunk]) -> Chunk | None:
        """The next chunk of a prefill worker, as long as that worker lives; None: there are no more."""
        task = asyncio.ensure_future(anext(chunks, None))
        try:
            while not (await asyncio.wait({task}, timeout=SILENT_S))[0]:
                if not await self._prefills.lives(worker_id):
                    raise ConnectionError("silent, and it does not answer another call")
            return task.result()
        finally:
            task.cancel()

    async def _failed(self, request_id: str, worker_id: str, error: Exception, *, has_begun: bool) -> PrefillFailed:
        """What a failed call says about the prefill worker."""
        if (refusal := parse_error(str(error))) is None:
            lives = has_begun and await self._prefills.lives(worker_id)
            told = one_line_of(error)
            return PrefillFailed(
                request_id, worker_id, PREFILL_WORKER_LOST, told, has_died=has_begun and not lives, lives=lives
            )
        status, message = refusal
        if status == ENGINE_DIED:
            return PrefillFailed(
                request_id, worker_id, PREFILL_WORKER_LOST, message, has_died=True, start=engine_start(message)
            )
        reason = PREFILL_WORKER_LOST if status == CallRefusedError.status else PREFILL_WORKER_REFUSED
        return PrefillFailed(request_id, worker_id, reason, message, status)

    async def _after_prefill(self, request: GenerateRequest) -> None:
        """A round has ended with its first token: take over its KV for the session's next round, if there is one."""
        if request.get("ends_session"):
            await self._rounds.kv({"op": "release_session", "session_id": request["task"]["session_id"]})
            return
        stops = {**(request["request"].get("stop_conditions") or {}), "max_tokens": 0}
        taking: GenerateRequest = {**request, "request": {**request["request"], "stop_conditions": stops}}
        try:
            await self._rounds.generate(taking, lambda _: None)
        except Exception as error:
            log.warning("the KV of a round was not taken over: %s", one_line_of(error))


def _taken_over(request: GenerateRequest, source: Source, token_ids: list[int]) -> GenerateRequest:
    """The request for the rest of a round whose first tokens came from a prefill worker.

    Only for requests that may be split (`ampd.serving.local_only.uncarried_option` is None).
    """
    stops = dict(request["request"].get("stop_conditions") or {})
    for name in ("max_tokens", "min_tokens"):
        if stops.get(name):
            stops[name] = max(0, stops[name] - len(token_ids))
    return {
        **request,
        "prompt": request["prompt"] + pack_tokens(token_ids),
        "source": source,
        "is_prefilled": True,
        "request": {**request["request"], "stop_conditions": stops},
    }


def _explained(error: Exception) -> tuple[int, str]:
    """(status, message) of a round that failed."""
    if isinstance(error, (EngineError, CallRefusedError)):
        return error.status, str(error)
    log.error("a round failed", exc_info=error)
    if isinstance(error, (KeyError, TypeError, ValueError, AttributeError, OverflowError)):
        return 500, f"the worker cannot read the request: {error!r}"
    return 500, f"the worker failed: {error!r}"
