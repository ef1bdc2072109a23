"""Prefills in slices, so that they share a worker with its decode batch and with the prefills that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import uuid4

from ampd.keys import tenant_of
from ampd.perf.model import PerformanceModel
from ampd.policies.base import SlicingPolicy, Wait
from ampd.serving.slices import LookUp, Rest, Slices, SliceStep, left_after, left_before, with_held
from ampd.types import PrefillTask, RunningRound
from workers.engines.base import Engine, EngineOutput, EngineRequest, PassShare
from workers.prefill_queue import QueuePlace
from workers.role import WorkerRole


@dataclass(slots=True)
class _Entry:
    """A round whose first token is out. `new`: choice -> tokens that came out here; choices advance together."""

    itl_slo_s: float
    prompt_tokens: int
    first_s: float
    handed_over: bool
    new: dict[int, int] = field(default_factory=dict)

    @property
    def new_tokens(self) -> int:
        return max(self.new.values(), default=0)


class RunningRounds:
    """Rounds by request id, from their first token (for those prefilled elsewhere: from the hand-over) to their end.

    Several choices of a round count as one: the choice that came furthest.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rounds: dict[str, _Entry] = {}
        self._ended = asyncio.Event()

    def handed_over(self, rid: str, itl_slo_s: float, prompt_tokens: int, first_s: float) -> None:
        """A round goes to the engine whose first token, the last of its prompt, came out elsewhere at `first_s`."""
        self._rounds[rid] = _Entry(itl_slo_s, prompt_tokens, first_s, handed_over=True)

    def add_tokens(self, rid: str, itl_slo_s: float, prompt_tokens: int, index: int, tokens: int) -> None:
        """New tokens of one choice came out."""
        entry = self._rounds.get(rid)
        if entry is None:
            entry = self._rounds[rid] = _Entry(itl_slo_s, prompt_tokens, self._clock(), handed_over=False)
        entry.new[index] = entry.new.get(index, 0) + tokens

    def ended(self, rid: str) -> None:
        """The round decodes no more, however it ended. A round that never began to decode is ignored."""
        if self._rounds.pop(rid, None) is not None:
            self._ended.set()

    def at(self, now_s: float) -> tuple[RunningRound, ...]:
        """All running rounds at this moment."""
        return tuple(
            RunningRound(
                entry.new_tokens + entry.handed_over,
                now_s - entry.first_s,
                entry.itl_slo_s,
                entry.prompt_tokens + entry.new_tokens,
            )
            for entry in self._rounds.values()
        )

    async def until_one_ends(self, timeout_s: float) -> None:
        """Wait until a round ends, at most for `timeout_s`."""
        self._ended.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            pass


_GREEDY: dict[str, Any] = {"sampling_options": {"temperature": 0.0}}


@dataclass(slots=True)
class Sliced:
    """The slices that were computed before the call that brings the first token.

    Attributes:
        rid: the request id for that call. The first call of the engine takes the id under which KV was read.
        slices: calls of the engine for slices; 0: the prefill runs whole.
        first: the last output of the first call, with its counts.
    """

    rid: str
    slices: int = 0
    first: EngineOutput | None = None


class Slicer:
    """Computes the beginning of a prompt in slices, as far as the policy wants slices.

    A slice is a call of the engine for a growing prefix of whole pages, without output. The engine's cache keeps the
    computed KV. Between two slices the decode batch runs on, and the ordering picks again among all waiting prefills.
    The last slice is the round's own call.
    """

    def __init__(
        self,
        policy: SlicingPolicy,
        model: PerformanceModel,
        engine: Engine,
        running: RunningRounds,
        clock: Callable[[], float],
        role: WorkerRole,
    ) -> None:
        info = engine.info
        self._policy = policy
        self._slices = Slices(policy, model, info.parallelism, info.page_size_tokens, lambda: role.role)
        self._engine = engine
        self._running = running
        self._clock = clock

    async def prepare(
        self,
        place: QueuePlace,
        task: PrefillTask,
        token_ids: list[int],
        request: dict[str, Any],
        rid: str,
        page_keys: Sequence[bytes],
        *,
        is_copy: bool = False,
    ) -> Sliced:
        """Compute all slices but the last. The prefill has a slot before and after. A cancelled slice is aborted.

        Args:
            page_keys: of all full pages of the prompt.
            is_copy: another worker owns the session, see `EngineRequest`.

        Raises:
            EngineError: the engine refused or failed a slice.
        """
        sliced = Sliced(rid)
        is_exact = False
        while not isinstance(step := self._next(place.pass_tasks, is_exact=is_exact), Rest):
            if isinstance(step, LookUp):
                if not self._can_slice(token_ids, request):
                    break
                place.correct(await self._as_held(place.pass_tasks[0], page_keys))
                is_exact = True
            elif isinstance(step, Wait):
                await place.pause(self._running.until_one_ends(step.wait_s))
            else:
                left = left_after(place.pass_tasks[0], step.end_tokens)
                prefix = token_ids[: step.end_tokens]
                call = EngineRequest(
                    sliced.rid,
                    task.session_id,
                    prefix,
                    0,
                    _GREEDY,
                    known_keys=page_keys,
                    tenant=tenant_of(request),
                    is_copy=is_copy,
                    share=PassShare(left_before(place.task, step.end_tokens), on_last_pass=place.on_last_pass()),
                )
                output = await self._compute(call)
                sliced.first = sliced.first or output
                sliced.slices += 1
                sliced.rid = uuid4().hex
                # The rest may then be picked for a pass with others.
                await place.again(left)
        return sliced

    async def taken_over(self, task: PrefillTask, page_keys: Sequence[bytes]) -> PrefillTask:
        """What is left of a prefill that was done elsewhere. Only an engine that shares passes needs to know it."""
        return await self._as_held(task, page_keys) if self._policy.shares_passes else task

    def _next(self, tasks: Sequence[PrefillTask], *, is_exact: bool) -> SliceStep:
        now_s = self._clock()
        return self._slices.next(tasks, self._running.at(now_s), now_s, is_exact=is_exact)

    def _can_slice(self, token_ids: list[int], request: dict[str, Any]) -> bool:
        """False for a prompt that the engine will refuse, and for log-probabilities of the prompt.

        For these the engine computes the whole prompt, so that its cache saves nothing.
        """
        output = request.get("output_options") or {}
        return len(token_ids) < self._engine.info.max_context_tokens and output.get("prompt_logprobs") is None

    async def _as_held(self, task: PrefillTask, page_keys: Sequence[bytes]) -> PrefillTask:
        """The task with the history that is really here, which may be less or more than the coordinator knew."""
        page = self._engine.info.page_size_tokens
        reply = await self._engine.kv.serve({"op": "match", "keys": list(page_keys)})
        pages = reply.get("matched", task.hist_tokens // page)
        return with_held(task, pages * page, page)

    async def _compute(self, call: EngineRequest) -> EngineOutput:
        """Compute one slice. Returns its last output."""
        last = EngineOutput([])
        async with aclosing(cast(AsyncGenerator[EngineOutput, None], self._engine.generate(call))) as stream:
            async for output in stream:
                last = output
        return last
