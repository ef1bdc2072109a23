"""A prefill in slices: the slicing policy says how it shares the worker with those that decode and those that wait."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast
from uuid import uuid4

from ampd.page_keys import page_keys
from ampd.perf.model import PerformanceModel
from ampd.policies.base import Slice, SlicingPolicy
from ampd.policies.passes import as_one
from ampd.types import PrefillTask
from workers.decoding import DecodingRounds
from workers.engines.base import Engine, EngineOutput, EngineRequest
from workers.prefill_queue import QueuePlace

_GREEDY: dict[str, Any] = {"sampling_options": {"temperature": 0.0}}


@dataclass(slots=True)
class Sliced:
    """What was computed ahead of the call that brings the first token.

    Attributes:
        rid: the request id for that call: the first call of the engine takes the one under which KV was staged.
        slices: calls of the engine; 0: the prefill runs whole.
        cached_tokens: prompt tokens that the first of them did not compute.
    """

    rid: str
    slices: int = 0
    cached_tokens: int = 0


class Slicer:
    """Computes the beginning of a prompt in slices, as far as the policy wants that.

    A slice is a call of the engine for a growing prefix of whole pages, without output: the engine's cache keeps what
    it computes. Between two slices the decode batch runs on, and the ordering chooses anew among all who wait. The last
    slice is the round's own call.
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

    async def prepare(
        self,
        place: QueuePlace,
        task: PrefillTask,
        token_ids: list[int],
        request: dict[str, Any],
        rid: str,
        staged_tokens: int,
    ) -> Sliced:
        """Compute all slices but the last; the prefill has a slot before and after. What is cancelled here is aborted.

        Args:
            staged_tokens: KV that was read from a peer under `rid`, to go behind what is held here.

        Raises:
            EngineError: the engine refused or failed a slice.
        """
        sliced = Sliced(rid)
        if not place.is_alone:
            # Passes of several are short, and are not cut.
            await self._until_affordable(as_one(place.pass_tasks))
            return sliced
        if _is_rest(self._ask(task), task) or not self._can_slice(token_ids, request):
            return sliced
        task = await self._as_held(task, token_ids, staged_tokens)
        while place.is_alone:
            chosen = self._ask(task)
            if chosen.wait_s > 0 and self._decoding.running(self._clock()):
                await self._decoding.until_one_ends(chosen.wait_s)
                continue
            end = self._end(task.hist_tokens, chosen.tokens)
            # With nobody decoding there is nobody to wait for.
            if chosen.wait_s > 0 or _is_rest(chosen, task) or end >= len(token_ids):
                break
            cached_tokens = await self._compute(sliced.rid, task.session_id, token_ids[:end])
            if not sliced.slices:
                sliced.cached_tokens = cached_tokens
            sliced.slices += 1
            sliced.rid = uuid4().hex
            task = replace(task, hist_tokens=end, incr_tokens=len(token_ids) - end)
            await place.again(task)
        if not place.is_alone:
            # What is left was picked for a pass with others.
            await self._until_affordable(as_one(place.pass_tasks))
        return sliced

    async def _until_affordable(self, task: PrefillTask) -> None:
        """Leave the worker to the rounds that decode for as long as the policy wants that."""
        while (wait_s := self._ask(task).wait_s) > 0 and self._decoding.running(self._clock()):
            await self._decoding.until_one_ends(wait_s)

    def _ask(self, task: PrefillTask) -> Slice:
        """What the policy says of what is left: slices that are done are history."""
        now_s = self._clock()
        running = self._decoding.running(now_s)
        return self._policy.slice(task, running, self._engine.info.parallelism, self._model, now_s)

    def _can_slice(self, token_ids: list[int], request: dict[str, Any]) -> bool:
        """Not what the engine will refuse, nor what its cache cannot help: prompt log-probabilities compute it all."""
        output = request.get("output_options") or {}
        return len(token_ids) < self._engine.info.max_context_tokens and output.get("prompt_logprobs") is None

    async def _as_held(self, task: PrefillTask, token_ids: list[int], staged_tokens: int) -> PrefillTask:
        """The task with the history that really is here: what the coordinator knew may have gone, or grown."""
        page = self._engine.info.page_size_tokens
        keys = page_keys(token_ids, page)
        reply = await self._engine.kv.serve({"op": "match", "keys": keys})
        held = reply.get("matched", task.hist_tokens // page) + staged_tokens // page
        hist = min(held, (len(token_ids) - 1) // page) * page
        return replace(task, hist_tokens=hist, incr_tokens=len(token_ids) - hist)

    def _end(self, start: int, tokens: int) -> int:
        """Where a slice ends: with a full page, for one that is not full would be computed again; one page at least."""
        page = self._engine.info.page_size_tokens
        return max((start + tokens) // page, start // page + 1) * page

    async def _compute(self, rid: str, session_id: str, prefix: list[int]) -> int:
        """One slice; returns how much of it was there already."""
        cached_tokens = 0
        call = EngineRequest(rid, session_id, prefix, 0, _GREEDY)
        async with aclosing(cast(AsyncGenerator[EngineOutput, None], self._engine.generate(call))) as stream:
            async for output in stream:
                cached_tokens = output.cached_tokens
        return cached_tokens


def _is_rest(chosen: Slice, task: PrefillTask) -> bool:
    return chosen.wait_s <= 0 and chosen.tokens >= task.incr_tokens
