"""The rounds that coordinators send to one worker: queue, KV read, engine, report.

It knows nothing of Dynamo but the shape of its chunks.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast
from uuid import uuid4

import msgspec

from ampd.background_tasks import RoundsInProgress
from ampd.errors import UserError
from ampd.handler_stream import Chunk, Send
from ampd.keys import TOKEN_BYTES, page_keys, tenant_of
from ampd.perf.corrections import READ, CorrectedModel
from ampd.sampling_limits import beyond_sampling, unknown_token
from ampd.serving.kv_tiers import longest_read_s, reading_pays, reusable_tokens
from ampd.types import Count, Parallelism, PrefillTask
from ampd.wire import MAX_CHOICES, REPORT_KEY, GenerateRequest, KvReply, KvRequest, PrefillRequest, Source, decode_task
from workers.engines.base import Engine, EngineError, EngineOutput, EngineRequest, OnPass
from workers.kv.exchange import KvFetch
from workers.prefill_queue import AsyncPrefillQueue, QueuePlace
from workers.round_log import RoundEvents
from workers.round_progress import RoundProgress
from workers.session_releaser import SessionReleaser

_LEAST_READ_S = 0.005
"""Shorter reads are not compared with their predicted times, because they are mostly delays of the processes."""


class KvReads:
    """The reads of one worker.

    Args:
        model: predicts the times of a read and of a computation, and learns those of reads.
        timeout_s: longest time for one read; most are given up sooner, see `longest_read_s`.
    """

    def __init__(self, engine: Engine, model: CorrectedModel, timeout_s: float) -> None:
        self._engine = engine
        self._model = model
        self._timeout_s = timeout_s
        self._begun = self._running = 0

    async def read(self, progress: RoundProgress, source: Source, expected_tokens: int) -> KvFetch | None:
        """Read what is missing here of a prompt's KV from another worker; None: it is computed here instead.

        Args:
            expected_tokens: of the prompt's KV, from its start, that the source is expected to hold.
        """
        kv, info = self._engine.kv, self._engine.info
        prompt_tokens, page = progress.prompt_tokens, info.page_size_tokens
        keys = progress.page_keys[: reusable_tokens(prompt_tokens, prompt_tokens, page) // page]
        held_tokens = kv.protect(progress.rid, keys)
        worker_id, tp, host = source
        peer = Parallelism(info.parallelism.tp if tp is None else tp, host=host)
        if not reading_pays(prompt_tokens, held_tokens, expected_tokens, self._model, info.parallelism, peer):
            return None
        timeout_s = longest_read_s(self._timeout_s, held_tokens, expected_tokens, self._model, info.parallelism, peer)
        self._begun += 1
        self._running += 1
        number, is_alone = self._begun, self._running == 1
        try:
            fetched = await kv.fetch(progress.rid, keys, held_tokens, worker_id, timeout_s, expected_tokens)
        finally:
            self._running -= 1
        is_moved = not peer.shares_host(info.parallelism)
        if is_alone and self._begun == number and fetched.error is None and is_moved:
            self._measured(fetched, peer)
        return fetched

    def _measured(self, fetched: KvFetch, peer: Parallelism) -> None:
        """A read that had this worker to itself has ended."""
        with suppress(UserError):  # the model lacks the degree of the peer
            predicted_s = self._model.kv_transfer_s(fetched.tokens, peer, self._engine.info.parallelism)
            if predicted_s >= _LEAST_READ_S:
                self._model.measured(READ, predicted_s, fetched.seconds)


def chunk_of(output: EngineOutput) -> dict[str, Any]:
    """One output as the frontend expects it; the last one of a choice carries reason and usage."""
    chunk: dict[str, Any] = {"token_ids": output.token_ids, "index": output.index}
    if output.log_probs is not None:
        chunk["log_probs"] = output.log_probs
    if output.top_logprobs is not None:
        chunk["top_logprobs"] = output.top_logprobs
    if output.finish_reason is not None:
        chunk["finish_reason"] = output.finish_reason
        if output.stop_reason is not None:
            chunk["stop_reason"] = output.stop_reason
        chunk["completion_usage"] = usage_of(output)
    return chunk


def usage_of(output: EngineOutput) -> dict[str, Any]:
    """Token counts of a call, as the engine saw it."""
    return {
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "total_tokens": output.prompt_tokens + output.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
    }


MOST_PAGES = 1 << 19
"""Of all sessions together: 8 million tokens with pages of 16. Their keys take at most 40 MB, and less where the
directory of the store has the same keys."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A prompt that was hashed.

    Attributes:
        digest: of its full pages' tokens, all at once, which takes a tenth of the time of hashing them page by page.
    """

    tenant: str
    digest: bytes
    keys: list[bytes]


class ContextKeys:
    """Names the pages of prompts (`ampd.keys`). Each page of a session is hashed here once, not in each round.

    A prompt takes over the keys of its session's last one only if it begins with the same tokens. This is checked by
    their digest, as the names of pages are, and neither another process nor the session's name is believed.

    Args:
        most_pages: whose keys are kept, of the sessions that were used last.
    """

    def __init__(self, most_pages: int = MOST_PAGES) -> None:
        self._most_pages = most_pages
        self._pages = 0
        self._known: dict[str, _Known] = {}

    def of(self, session_id: str, packed: array[int], page_tokens: int, *, tenant: str) -> list[bytes]:
        """One key per full page of a session's prompt.

        Args:
            packed: the prompt as native 32-bit words.
            page_tokens: tokens per page, the same in all calls.
        """
        words = memoryview(packed).cast("B")[: len(packed) // page_tokens * page_tokens * TOKEN_BYTES]
        before = self._taken(session_id)
        known_bytes = len(before.keys) * page_tokens * TOKEN_BYTES if before else 0
        digest = sha256(words[:known_bytes])
        is_longer = before is not None and before.tenant == tenant and known_bytes <= len(words)
        known = before.keys if before and is_longer and digest.digest() == before.digest else ()
        keys = page_keys(packed, page_tokens, known, tenant=tenant)
        digest.update(words[known_bytes:])
        self._keep(session_id, _Known(tenant, digest.digest(), keys))
        return keys

    def forget(self, session_id: str) -> None:
        """Forget a session, which has ended or moved away."""
        self._taken(session_id)

    def _taken(self, session_id: str) -> _Known | None:
        known = self._known.pop(session_id, None)
        self._pages -= len(known.keys) if known else 0
        return known

    def _keep(self, session_id: str, known: _Known) -> None:
        self._known[session_id] = known
        self._pages += len(known.keys)
        while self._pages > self._most_pages:
            self.forget(next(iter(self._known)))


class RoundService:
    """Serves the worker's endpoints, whatever its role. A method gets a `send` for the chunks of its answer.

    Args:
        worker_id: this worker, so that it never reads from itself.
        events: observes the rounds.
        reads: reads KV from other workers.
    """

    def __init__(
        self,
        worker_id: str,
        engine: Engine,
        queue: AsyncPrefillQueue,
        sessions: SessionReleaser,
        events: RoundEvents,
        reads: KvReads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._queue = queue
        self._sessions = sessions
        self._events = events
        self._reads = reads
        self._clock = clock
        self._in_progress = RoundsInProgress()
        self._context_keys = ContextKeys()

    @property
    def running(self) -> int:
        """Rounds in progress here, waiting ones included."""
        return len(self._in_progress)

    async def drained(self) -> None:
        """Wait until no round is in progress."""
        await self._in_progress.drained()

    async def prefill(self, request: PrefillRequest, send: Send[Chunk]) -> None:
        """Prefill a context for another worker: one chunk with the first token. The KV stays for the other's read."""
        source = self._peer(request)
        progress = self._begin(request)
        try:
            with self._place(progress, source) as place:
                async with self._sessions.round(progress.task.session_id, is_copy=True):
                    await self._picked(place, progress)
                    expected_tokens = progress.task.hist_tokens or progress.prompt_tokens
                    await self._fetch(progress, source, "history", expected_tokens)
                    await self._slot(place, progress)
                    chunk = await self._first_token(request, progress, place.passes)
                    self._events.first_token(progress)
            # The client waits for this token. What is stored after it is published, and the other's read waits for it.
            send(await self._with_report(chunk, progress, waits=False))
        finally:
            await self._end(progress, was_queued=True)

    async def generate(self, request: GenerateRequest, send: Send[Chunk]) -> None:
        """Run a round to its end. With a source its increment was prefilled there; without a source it queues here."""
        source = self._peer(request)
        progress = self._begin(request)
        whole = source if request.get("is_prefilled") else None
        session_id, has_context = progress.task.session_id, progress.kept_tokens > 0
        try:
            async with self._sessions.round(
                session_id, has_context=has_context, is_last=bool(request.get("ends_session"))
            ):
                if whole:
                    await self._taken_over(request, progress, whole, send)
                else:
                    await self._local(request, progress, source, send)
        finally:
            await self._end(progress, was_queued=whole is None)

    async def kv(self, request: KvRequest) -> KvReply:
        """Answer a call of another worker, or of a coordinator."""
        reply: KvReply
        if request["op"] == "release_session":
            self._context_keys.forget(request["session_id"])
            reply = {"released_tokens": await self._sessions.release(request["session_id"])}
        else:
            reply = await self._engine.kv.serve(request)
        self._events.kv_served(request, reply)
        return reply

    # -- the two kinds of rounds

    async def _local(
        self, request: GenerateRequest, progress: RoundProgress, holder: Source | None, send: Send[Chunk]
    ) -> None:
        """A round that is prefilled and decoded here. After a move it first reads its history from the old owner."""
        with self._place(progress, holder) as place:
            await self._picked(place, progress)
            await self._fetch(progress, holder, "history", progress.task.hist_tokens)
            await self._slot(place, progress)
            await self._stream(request, progress, place, send)

    async def _taken_over(
        self, request: GenerateRequest, progress: RoundProgress, source: Source, send: Send[Chunk]
    ) -> None:
        """A round whose first token came from the prefill worker `source`."""
        await self._fetch(progress, source, "increment", progress.prompt_tokens)
        progress.started_s = self._clock()
        if progress.prompt_tokens >= self._engine.info.max_context_tokens:
            # The first token was the last one that the context takes.
            output = EngineOutput([], finish_reason="length", prompt_tokens=progress.prompt_tokens)
            send(await self._with_report(chunk_of(output), progress))
            return
        progress.handed_over_s = progress.arrived_s
        await self._stream(request, progress, None, send)

    async def _stream(
        self, request: GenerateRequest, progress: RoundProgress, place: QueuePlace | None, send: Send[Chunk]
    ) -> None:
        """The engine's outputs as chunks; the last is held back until the engine is done, and carries the report."""
        last: Chunk | None = None
        most_tokens = _max_tokens(request)
        async with aclosing(self._outputs(request, progress, most_tokens, place.passes if place else None)) as outputs:
            async for output in outputs:
                if place:
                    if most_tokens != 0:
                        self._events.first_token(progress)
                    place.leave()
                    self._events.left_queue(progress)
                    place = None
                if output.token_ids:
                    self._events.tokens(progress, output.index, len(output.token_ids))
                if last is not None:
                    send(last)
                last = chunk_of(output)
                if output.finish_reason is None:
                    send(last)
                    last = None
                else:
                    progress.set_tiers(output)
        if last is not None:
            self._events.decoded(last, progress)
            send(await self._with_report(last, progress))

    async def _first_token(self, request: PrefillRequest, progress: RoundProgress, on_pass: OnPass) -> Chunk:
        """Prefill and sample one token."""
        whole = EngineOutput([])
        async with aclosing(self._outputs(request, progress, 1, on_pass, is_copy=True)) as outputs:
            async for output in outputs:
                _append(whole, output)
        progress.set_tiers(whole)
        if whole.finish_reason == "length":
            # One token was asked for, so reaching that length ends nothing; any other reason ends the round.
            whole.finish_reason = None
        chunk = chunk_of(whole)
        chunk["completion_usage"] = usage_of(whole)
        return chunk

    # -- steps

    def _begin(self, request: PrefillRequest | GenerateRequest) -> RoundProgress:
        now_s = self._clock()
        # The queue is published with its tasks, and a malformed one would hide this worker from all coordinators.
        task, packed = decode_task(request["task"], now_s), array("I")
        packed.frombytes(request["prompt"])
        if ((request["request"].get("sampling_options") or {}).get("n") or 1) > MAX_CHOICES:
            raise EngineError(f"n must be at most {MAX_CHOICES}", 400)
        info = self._engine.info
        size = info.vocabulary_size
        if size is not None and (reason := unknown_token(packed, request["request"], size)):
            raise EngineError(reason, 400)
        if reason := beyond_sampling(request["request"]):
            raise EngineError(reason, 400)
        tenant = tenant_of(request["request"])
        keys = self._context_keys.of(task.session_id, packed, info.page_size_tokens, tenant=tenant)
        kept_tokens = msgspec.convert(request.get("kept_tokens", 0), Count)
        # Nothing may fail between here and the caller's `try`: what is counted must be uncounted.
        self._in_progress.begin()
        return RoundProgress(uuid4().hex, task, packed.tolist(), now_s, keys, min(kept_tokens, len(packed)))

    async def _end(self, progress: RoundProgress, *, was_queued: bool) -> None:
        """Leave nothing behind, however the round ended."""
        self._in_progress.end()
        self._events.ended(progress, was_queued=was_queued)
        await self._engine.kv.unprotect(progress.rid)

    @contextmanager
    def _place(self, progress: RoundProgress, source: Source | None) -> Iterator[QueuePlace]:
        self._events.queued(progress.task, source[0] if source else None, len(self._queue))
        try:
            with self._queue.place(progress.task, fetches=source is not None) as place:
                yield place
        finally:
            self._events.left_queue(progress)

    async def _picked(self, place: QueuePlace, progress: RoundProgress) -> None:
        await place.picked()
        self._events.picked(progress.task)

    async def _fetch(self, progress: RoundProgress, source: Source | None, part: str, expected_tokens: int) -> None:
        if source is None:
            return
        if fetched := await self._reads.read(progress, source, expected_tokens):
            progress.fetched = fetched
            self._events.kv_read(source[0], part, fetched)

    async def _slot(self, place: QueuePlace, progress: RoundProgress) -> None:
        """Wait for room in the engine."""
        await place.slot()
        progress.started_s = self._clock()

    async def _with_report(self, chunk: Chunk, progress: RoundProgress, *, waits: bool = True) -> Chunk:
        load = self._engine.load()
        held_tokens = await self._engine.kv.held_tokens(progress.task.session_id, waits=waits)
        hit_tokens = progress.hit_tokens(self._engine.info.page_size_tokens)
        self._events.found(progress, hit_tokens)
        return {**chunk, REPORT_KEY: progress.report(load, held_tokens, hit_tokens)}

    def _peer(self, request: PrefillRequest) -> Source | None:
        """The source of a round's KV, if it is another worker."""
        source: Source | None = msgspec.convert(request["source"], Source | None)
        return None if source is None or source[0] == self._worker_id else source

    def _outputs(
        self,
        request: PrefillRequest | GenerateRequest,
        progress: RoundProgress,
        max_new_tokens: int | None,
        on_pass: OnPass | None,
        *,
        is_copy: bool = False,
    ) -> AsyncGenerator[EngineOutput, None]:
        call = EngineRequest(
            rid=progress.rid,
            session_id=progress.task.session_id,
            token_ids=progress.token_ids,
            max_new_tokens=max_new_tokens,
            request=request["request"],
            known_keys=progress.page_keys,
            tenant=tenant_of(request["request"]),
            ttft_slo_s=progress.task.slo.ttft_s,
            is_copy=is_copy,
            task=_prefill_task(progress),
            first_s=progress.handed_over_s,
            on_pass=on_pass,
        )
        # Closing it aborts the request, so an engine's iterator always has `aclose`.
        return cast(AsyncGenerator[EngineOutput, None], self._engine.generate(call))


def _prefill_task(progress: RoundProgress) -> PrefillTask:
    """The prefill as the engine gets it. A first token that came elsewhere is part of the prompt."""
    task, tokens = progress.task, progress.prompt_tokens
    hist_tokens = tokens - 1 if progress.handed_over_s is not None else task.hist_tokens
    return task.with_tokens(hist_tokens, tokens - hist_tokens)


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
        whole.cached_tokens, whole.reloaded_tokens = part.cached_tokens, part.reloaded_tokens
        whole.reload_s = part.reload_s
