"""A local prefill in slices: the slicing policy says how it shares the worker with the batch that decodes there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast
from uuid import uuid4

from ampd.page_keys import page_keys
from ampd.perf.model import PerformanceModel
from ampd.policies.base import Slice, SlicingPolicy
from ampd.types import PrefillTask
from workers.decoding import DecodingRounds
from workers.engines.base import Engine, EngineOutput, EngineRequest

_GREEDY: dict[str, Any] = {"sampling_options": {"temperature": 0.0}}


@dataclass(slots=True)
class Sliced:
    """What was computed ahead of the call that brings the first token.

    Attributes:
        slices: calls of the engine; 0: the prefill runs whole.
        cached_tokens: prompt tokens that the first of them did not compute.
    """

    slices: int = 0
    cached_tokens: int = 0


class LocalSlicer:
    """Computes the beginning of a prompt in slices, as far as the policy wants that.

    A slice is a call of the engine for a growing prefix of whole pages, without output: the engine's cache keeps what
    it computes, and the decode batch runs on between two slices. The last slice is the round's own call.
    """

    def __init__(
        self,
        policy: SlicingPolicy,
        model: PerformanceModel,
        engine: Engine,
        decoding: DecodingRounds,
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._model = model
        self._engine = engine
        self._decoding = decoding
        self._clock = clock

    async def prepare(self, task: PrefillTask, token_ids: list[int], request: dict[str, Any]) -> Sliced:
        """Compute all slices but the last. Closing the task that waits here aborts the slice that runs.

        Raises:
            EngineError: the engine refused or failed a slice.
        """
        sliced = Sliced()
        if _is_rest(self._ask(task, 0), task, 0) or not self._can_slice(token_ids, request):
            return sliced
        task, done = await self._as_held(task, token_ids), 0
        while True:
            chosen = self._ask(task, done)
            if chosen.wait_s > 0 and self._decoding.running(self._clock()):
                await self._decoding.until_one_ends(chosen.wait_s)
                continue
            end = self._end(task.hist_tokens + done, chosen.tokens)
            # With nobody decoding there is nobody to wait for.
            if chosen.wait_s > 0 or _is_rest(chosen, task, done) or end >= len(token_ids):
                return sliced
            cached_tokens = await self._compute(task.session_id, token_ids[:end])
            if not sliced.slices:
                sliced.cached_tokens = cached_tokens
            sliced.slices += 1
            done = end - task.hist_tokens

    def _ask(self, task: PrefillTask, done_tokens: int) -> Slice:
        now_s = self._clock()
        running = self._decoding.running(now_s)
        return self._policy.slice(task, done_tokens, running, self._engine.info.parallelism, self._model, now_s)

    def _can_slice(self, token_ids: list[int], request: dict[str, Any]) -> bool:
        """Not what the engine will refuse, nor what its cache cannot help: prompt log-probabilities compute it all."""
        output = request.get("output_options") or {}
        return len(token_ids) < self._engine.info.max_context_tokens and output.get("prompt_logprobs") is None

    async def _as_held(self, task: PrefillTask, token_ids: list[int]) -> PrefillTask:
        """The task with the history that really is here: what the coordinator knew may have gone, or grown."""
        page = self._engine.info.page_size_tokens
        keys = page_keys(token_ids, page)
        reply = await self._engine.kv.serve({"op": "match", "keys": keys})
        hist = min(reply.get("matched", task.hist_tokens // page), (len(token_ids) - 1) // page) * page
        return replace(task, hist_tokens=hist, incr_tokens=len(token_ids) - hist)

    def _end(self, start: int, tokens: int) -> int:
        """Where a slice ends: with a full page, for one that is not full would be computed again; one page at least."""
        page = self._engine.info.page_size_tokens
        return max((start + tokens) // page, start // page + 1) * page

    async def _compute(self, session_id: str, prefix: list[int]) -> int:
        """One slice; returns how much of it was there already."""
        cached_tokens = 0
        call = EngineRequest(uuid4().hex, session_id, prefix, 0, _GREEDY)
        async with aclosing(cast(AsyncGenerator[EngineOutput, None], self._engine.generate(call))) as stream:
            async for output in stream:
                cached_tokens = output.cached_tokens
        return cached_tokens


def _is_rest(chosen: Slice, task: PrefillTask, done_tokens: int) -> bool:
    return chosen.wait_s <= 0 and chosen.tokens >= task.incr_tokens - done_tokens
