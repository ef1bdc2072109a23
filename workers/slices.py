"""Prefills in slices, so that they share a worker with its decode batch and with the prefills that wait."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from ampd.keys import tenant_of
from ampd.perf.model import PerformanceModel
from ampd.policies.base import SlicingPolicy, Wait
from ampd.serving.slices import LookUp, Rest, Slices, SliceStep, left_after, left_before, with_held
from ampd.types import PrefillTask
from workers.engines.base import Engine, EngineOutput, EngineRequest, PassShare
from workers.prefill_queue import QueuePlace
from workers.role import WorkerRole
from workers.running_rounds import RunningRounds

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
