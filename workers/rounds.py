"""A round on one worker: queue, KV read, engine, measurements. Knows nothing of Dynamo but the shape of its chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import uuid4

from ampd.perf.model import PerformanceModel
from ampd.policies.base import SlicingPolicy
from ampd.serving.sliding_window import SlidingWindow
from ampd.types import PrefillTask
from ampd.wire import REPORT_KEY, GenerateRequest, KvReply, KvRequest, PrefillRequest, RoundReport, decode_task
from workers.chunks import chunk_of, usage_of
from workers.decoding import DecodingRounds
from workers.engines.base import Engine, EngineOutput, EngineRequest
from workers.kv.exchange import KvFetch
from workers.prefill_queue import AsyncPrefillQueue, QueuePlace
from workers.publisher import Publisher
from workers.recorder import WorkerRecorder
from workers.round_log import RoundSteps
from workers.sessions import SessionKeeper
from workers.slices import Sliced, Slicer

Chunk = dict[str, Any]
Chunks = AsyncGenerator[Chunk, None]


@dataclass(slots=True)
class _Progress:
    """What is measured of one round here. Times are on the worker's clock.

    Attributes:
        handed_over_s: when the round's first token, sampled elsewhere, came with the request; None: it is sampled here.
    """

    rid: str
    session_id: str
    arrived_s: float
    started_s: float = 0.0
    handed_over_s: float | None = None
    prefill_s: float = 0.0
    cached_tokens: int = 0
    sliced: Sliced | None = None
    fetched: KvFetch = field(default_factory=KvFetch)


class Rounds:
    """Runs the rounds that coordinators send to one worker, whatever its role.

    Args:
        worker_id: this worker, so that it never reads from itself.
        slicing: how a prefill shares the worker with the decode batch and those that wait, and the model that it
            predicts with; None: it runs whole.
        steps: logs the steps of rounds.
        recorder: counts them.
    """

    def __init__(
        self,
        worker_id: str,
        engine: Engine,
        queue: AsyncPrefillQueue,
        sessions: SessionKeeper,
        publisher: Publisher,
        ttft: SlidingWindow,
        itl: SlidingWindow,
        kv_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        slicing: tuple[SlicingPolicy, PerformanceModel] | None = None,
        steps: RoundSteps | None = None,
        recorder: WorkerRecorder | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._queue = queue
        self._sessions = sessions
        self._publisher = publisher
        self._ttft = ttft
        self._itl = itl
        self._kv_timeout_s = kv_timeout_s
        self._clock = clock
        self._decoding = DecodingRounds(clock)
        self._slicer = Slicer(*slicing, engine, self._decoding, clock) if slicing else None
        self._steps = steps or RoundSteps(worker_id)
        self._recorder = recorder or WorkerRecorder()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Rounds in progress here, waiting ones included."""
        return self._running

    async def drained(self) -> None:
        """Wait until no round is in progress."""
        await self._idle.wait()

    async def prefill(self, request: PrefillRequest) -> Chunks:
        """Prefill a context for another worker: one chunk with the first token; the KV stays for the other's read."""
        task, progress = self._begin(request)
        source = self._peer(request["source_worker_id"])
        try:
            with self._place(task, source) as place:
                async with self._sessions.round(task.session_id):
                    await self._picked(place, task)
                    await self._fetch(progress, request["token_ids"], source, "history")
                    await place.slot()
                    progress.started_s = self._clock()
                    await self._slices(request, task, progress, place)
                    chunk = await self._first_token(request, progress)
                    self._saw_first_token(task, progress)
            yield await self._with_report(chunk, progress)
        finally:
            await self._end(progress, task)

    async def generate(self, request: GenerateRequest) -> Chunks:
        """Run a round to its end; with a source its increment was prefilled there, without one it queues here."""
        task, progress = self._begin(request)
        source = self._peer(request["source_worker_id"])
        rounds = self._decode(request, task, progress, source) if source else self._local(request, task, progress)
        try:
            async with self._sessions.round(task.session_id), aclosing(rounds):
                async for chunk in rounds:
                    yield chunk
        finally:
            await self._end(progress, None if source else task)

    async def kv(self, request: KvRequest) -> KvReply:
        """Answer a call of another worker, or of a coordinator."""
        reply: KvReply
        if request["op"] == "release_session":
            reply = {"released_tokens": await self._sessions.release(request["session_id"])}
        else:
            reply = await self._engine.kv.serve(request)
        self._steps.served(request, reply)
        return reply

    # -- the two kinds of rounds

    async def _local(self, request: GenerateRequest, task: PrefillTask, progress: _Progress) -> Chunks:
        with self._place(task, None) as place:
            await self._picked(place, task)
            await place.slot()
            progress.started_s = self._clock()
            await self._slices(request, task, progress, place)
            async with aclosing(self._stream(request, task, progress, place)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _decode(self, request: GenerateRequest, task: PrefillTask, progress: _Progress, source: str) -> Chunks:
        await self._fetch(progress, request["token_ids"], source, "increment")
        progress.started_s = self._clock()
        if len(request["token_ids"]) >= self._engine.info.max_context_tokens:
            # The first token was the last one that the context takes.
            output = EngineOutput([], finish_reason="length", prompt_tokens=len(request["token_ids"]))
            yield await self._with_report(chunk_of(output), progress)
            return
        progress.handed_over_s = progress.arrived_s
        if _max_tokens(request) != 0:
            self._decoding.handed_over(progress.rid, task.slo.itl_s, len(request["token_ids"]), progress.handed_over_s)
        async with aclosing(self._stream(request, task, progress, None)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _stream(
        self, request: GenerateRequest, task: PrefillTask, progress: _Progress, place: QueuePlace | None
    ) -> Chunks:
        """The engine's outputs as chunks; the last is held back until the engine is done, and carries the report."""
        outputs = self._outputs(request, progress, _max_tokens(request))
        last_s: dict[int, float] = {}
        last: Chunk | None = None
        async with aclosing(outputs) as stream:
            async for output in stream:
                if place:
                    self._saw_first_token(task, progress)
                    place.leave()
                    place = None
                self._saw_tokens(output, last_s, progress, task.slo.itl_s, len(request["token_ids"]))
                output.cached_tokens = _cached_tokens(output, progress)
                if last is not None:
                    yield last
                last = None
                chunk = chunk_of(output)
                if output.finish_reason is None:
                    yield chunk
                else:
                    progress.cached_tokens = output.cached_tokens
                    last = chunk
        if last is not None:
            self._steps.decoded(last, self._clock() - progress.started_s)
            yield await self._with_report(last, progress)

    async def _first_token(self, request: PrefillRequest, progress: _Progress) -> Chunk:
        """Prefill and sample one token."""
        outputs = self._outputs(request, progress, 1)
        whole = EngineOutput([])
        async with aclosing(outputs) as stream:
            async for output in stream:
                _append(whole, output)
        progress.cached_tokens = whole.cached_tokens = _cached_tokens(whole, progress)
        reason, whole.finish_reason = whole.finish_reason, None
        if reason not in (None, "length"):
            # One token was asked for, so reaching that length ends nothing; anything else ends the round.
            whole.finish_reason = reason
        chunk = chunk_of(whole)
        chunk["completion_usage"] = usage_of(whole)
        return chunk

    # -- steps

    def _begin(self, request: PrefillRequest | GenerateRequest) -> tuple[PrefillTask, _Progress]:
        now_s = self._clock()
        task = decode_task(request["task"], now_s)
        self._running += 1
        self._idle.clear()
        return task, _Progress(uuid4().hex, task.session_id, now_s)

    async def _end(self, progress: _Progress, task: PrefillTask | None) -> None:
        """Whatever happened, leave nothing behind."""
        self._decoding.ended(progress.rid)
        self._running -= 1
        if not self._running:
            self._idle.set()
        if task:
            self._publisher.finished(task.task_id)
        self._publisher.changed()
        await self._engine.kv.discard(progress.rid)

    def _place(self, task: PrefillTask, source: str | None) -> AbstractContextManager[QueuePlace]:
        self._steps.queued(task, source, len(self._queue), self._clock())
        return self._queue.place(task, fetches=source is not None)

    async def _picked(self, place: QueuePlace, task: PrefillTask) -> None:
        await place.picked()
        self._steps.picked(task, self._clock())

    async def _fetch(self, progress: _Progress, token_ids: list[int], source: str | None, part: str) -> None:
        if source:
            progress.fetched = await self._engine.kv.fetch(
                progress.rid, progress.session_id, token_ids, source, self._kv_timeout_s
            )
            self._steps.read(source, part, progress.fetched)
            self._recorder.read(part, progress.fetched)

    async def _slices(
        self, request: PrefillRequest | GenerateRequest, task: PrefillTask, progress: _Progress, place: QueuePlace
    ) -> None:
        """Compute ahead of the round's own call what the slicing policy wants apart."""
        if self._slicer:
            progress.sliced = await self._slicer.prepare(
                place, task, request["token_ids"], request["request"], progress.rid, progress.fetched.tokens
            )
            progress.rid = progress.sliced.rid

    def _saw_first_token(self, task: PrefillTask, progress: _Progress) -> None:
        now_s = self._clock()
        progress.prefill_s = now_s - progress.started_s
        self._steps.prefilled(task, progress.prefill_s)
        self._recorder.prefilled(_queued_s(progress), progress.prefill_s, _slices(progress))
        self._ttft.add(now_s - task.arrival_s, now_s)
        self._publisher.changed()

    def _saw_tokens(
        self, output: EngineOutput, last_s: dict[int, float], progress: _Progress, itl_slo_s: float, prompt_tokens: int
    ) -> None:
        if not output.token_ids:
            return
        self._decoding.saw(progress.rid, itl_slo_s, prompt_tokens, output.index, len(output.token_ids))
        now_s = self._clock()
        if not last_s and progress.handed_over_s is not None:
            # It decodes from here on; a round that was prefilled here has said so with its first token.
            self._publisher.changed()
        before_s = last_s.get(output.index, progress.handed_over_s)
        last_s[output.index] = now_s
        if before_s is not None:
            gap_s, tokens = (now_s - before_s) / len(output.token_ids), len(output.token_ids)
            self._itl.add(gap_s, now_s, tokens)
            self._recorder.gap(gap_s, tokens)
            self._publisher.sampled()

    async def _with_report(self, chunk: Chunk, progress: _Progress) -> Chunk:
        load = self._engine.load()
        report = RoundReport(
            held_tokens=await self._engine.kv.held_tokens(progress.session_id),
            cached_tokens=progress.cached_tokens,
            queued_s=_queued_s(progress),
            prefill_s=progress.prefill_s,
            kv_read_tokens=progress.fetched.tokens,
            kv_read_bytes=progress.fetched.bytes,
            kv_read_s=progress.fetched.seconds,
            decode_batch=load.running_requests,
            decode_context_tokens=load.running_context_tokens,
        )
        if progress.fetched.error:
            report["kv_read_error"] = progress.fetched.error
        if (slices := _slices(progress)) > 1:
            report["slices"] = slices
        return {**chunk, REPORT_KEY: report}

    def _peer(self, worker_id: str | None) -> str | None:
        return None if worker_id == self._worker_id else worker_id

    def _outputs(
        self, request: PrefillRequest | GenerateRequest, progress: _Progress, max_new_tokens: int | None
    ) -> AsyncGenerator[EngineOutput, None]:
        call = EngineRequest(
            rid=progress.rid,
            session_id=progress.session_id,
            token_ids=request["token_ids"],
            max_new_tokens=max_new_tokens,
            request=request["request"],
        )
        # Closing it aborts the request, so an engine's iterator always has `aclose`.
        return cast(AsyncGenerator[EngineOutput, None], self._engine.generate(call))


def _queued_s(progress: _Progress) -> float:
    return max(0.0, progress.started_s - progress.arrived_s - progress.fetched.seconds)


def _slices(progress: _Progress) -> int:
    """Calls of the engine for the prefill; the round's own is the last one."""
    return progress.sliced.slices + 1 if progress.sliced else 1


def _cached_tokens(output: EngineOutput, progress: _Progress) -> int:
    """What the prefill did not compute: the last slice found the others in the cache, the round as a whole did not."""
    sliced = progress.sliced
    return sliced.cached_tokens if sliced and sliced.slices else output.cached_tokens


def _max_tokens(request: GenerateRequest) -> int | None:
    stop: dict[str, Any] = request["request"].get("stop_conditions") or {}
    limit = stop.get("max_tokens")
    return None if limit is None else int(limit)


def _append(whole: EngineOutput, part: EngineOutput) -> None:
    whole.token_ids = whole.token_ids + part.token_ids
    if part.log_probs is not None:
        whole.log_probs = (whole.log_probs or []) + part.log_probs
    if part.top_logprobs is not None:
        whole.top_logprobs = (whole.top_logprobs or []) + part.top_logprobs
    if part.finish_reason is not None:
        whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
        whole.prompt_tokens, whole.completion_tokens = part.prompt_tokens, part.completion_tokens
        whole.cached_tokens = part.cached_tokens
