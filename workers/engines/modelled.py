"""An engine that takes the time the performance model says: continuous batching without a GPU, and without torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from pydantic import Field

from ampd.errors import UserError
from ampd.keys import PAGE_TOKENS, page_keys
from ampd.perf.corrections import LOAD, MIXED, PREFILL, STEP, CorrectedModel
from ampd.perf.model import PerformanceModel, joined_tokens, scaled
from ampd.policies.base import SlicingPolicy
from ampd.policies.slicing.whole import WholeSlicing
from ampd.serving.kv_eviction import NextRounds
from ampd.serving.kv_tiers import Found, reloading_pays, reusable_tokens, tiers_of
from ampd.serving.pass_sizes import PassSizes, divided
from ampd.settings import Settings
from ampd.types import Parallelism, Role
from workers.engines.base import EngineError, EngineInfo, EngineLoad, EngineLostError, EngineOutput, EngineRequest
from workers.engines.modelled_request import ActiveRequest, ActiveRequests, OutputLimits, TimeLine
from workers.engines.modelled_tokens import ModelFacts, TokenSource, read_model_folder
from workers.engines.replies import OutputPlanner, Replies
from workers.kv.exchange import KvExchange
from workers.kv.modelled import ModelledDevice, ModelledStore, ModelledTransport
from workers.settings import WorkerSettings
from workers.unfailing import UnfailingSlicing

log = logging.getLogger(__name__)

_STORE_SHARE = 4


class ModelledSettings(Settings):
    """What the modelled engine simulates."""

    time_scale: float = Field(
        1.0, gt=0, description="Factor on all modelled times. Predictions do not know it: they learn it."
    )
    kv_capacity_tokens: int = Field(262_144, ge=1, description="KV memory of the device, in tokens.")
    kv_store_tokens: int | None = Field(
        None,
        ge=1,
        description="KV store in host memory, in tokens; default: four times the device's.",
    )
    max_context_tokens: int | None = Field(
        None, ge=2, description="Longest context; default: what the model's config.json says."
    )
    page_size: int = Field(PAGE_TOKENS, ge=1, description="Tokens per KV page.")
    eos_every_tokens: int = Field(
        128,
        ge=0,
        description="Mean output tokens after which a round without `ignore_eos` ends by itself; 0: never.",
    )
    replies: Path | None = Field(
        None,
        description="Scripted replies (JSON lines, one reply per turn); default: made-up words.",
    )

    @property
    def store_tokens(self) -> int:
        """Size of the store. Servers have a few times as much host memory as their GPUs have for KV."""
        return _STORE_SHARE * self.kv_capacity_tokens if self.kv_store_tokens is None else self.kv_store_tokens


def create_modelled(settings: WorkerSettings, times: CorrectedModel, slicing: SlicingPolicy) -> ModelledEngine:
    """A modelled engine for `settings`, which must be those of `settings_model("modelled")`.

    Args:
        times: what the worker predicts with, and corrects.
        slicing: says what the engine computes next.

    Raises:
        UserError: the model folder, the profile or the scripted replies cannot be used.
    """
    if not isinstance(settings, ModelledSettings):
        raise UserError("the settings are not those of the modelled engine")
    parallelism = Parallelism(tp=settings.tp)
    times.reload_s(1, parallelism)  # a profile may lack these times
    facts = read_model_folder(settings.model)
    facts = replace(facts, max_context_tokens=settings.max_context_tokens or facts.max_context_tokens)
    replies = Replies.read(settings.replies) if settings.replies else None
    engine = ModelledEngine(
        facts,
        scaled(times.model, settings.time_scale),
        parallelism,
        settings.kv_capacity_tokens,
        settings.store_tokens,
        settings.page_size,
        settings.eos_every_tokens,
        OutputPlanner(settings.model, facts.eos_token_ids, replies),
        times,
    )
    role = Role(settings.role)
    engine.sizes = PassSizes(UnfailingSlicing(slicing), times, parallelism, settings.page_size, lambda: role)
    return engine


class ModelledEngine:
    """One modelled replica: a single time line on which passes follow each other.

    Before each pass it asks what to compute: prefills, a step of the batch, or both. A round that was prefilled
    elsewhere joins the batch directly: the next step computes its tail. A request that is submitted in answer to a
    prefill comes after the next pass, because the time line does not wait for it.

    Running requests take device memory, which also keeps what was computed last while there is room. The store keeps
    the KV of sessions. KV that is in the store but not on the device is reloaded while the prefill computes.

    Args:
        facts: vocabulary, limits and sizes of the model.
        model: the times that everything takes.
        kv_store_tokens: size of the store.
        eos_every: mean number of tokens between two ends of sequence; 0: none.
        planner: of outputs that are not made up; None: all are, and grammars are ignored.
        times: what the worker predicts with, and corrects by the times of this engine; None: `model`, uncorrected.

    Attributes:
        sizes: says what the next pass computes. Set before the start; by itself prefills run whole.
    """

    def __init__(
        self,
        facts: ModelFacts,
        model: PerformanceModel,
        parallelism: Parallelism,
        kv_capacity_tokens: int,
        kv_store_tokens: int,
        page_size: int = PAGE_TOKENS,
        eos_every: int = 0,
        planner: OutputPlanner | None = None,
        times: CorrectedModel | None = None,
    ) -> None:
        fingerprint = sha256(f"modelled {facts.digest} {page_size}".encode()).hexdigest()[:16]
        self._belief, self._times = times or model, times
        self._next_rounds = NextRounds(self._belief, parallelism)
        token_bytes = facts.kv_bytes_per_token
        self._store = ModelledStore(page_size, kv_store_tokens, token_bytes, fingerprint, self._next_rounds.surplus)
        transport = ModelledTransport(model, parallelism, token_bytes)
        self._kv = KvExchange(self._store, lambda _address, _bytes: transport)
        self._info = EngineInfo(
            parallelism=parallelism,
            kv_capacity_tokens=kv_capacity_tokens,
            max_context_tokens=facts.max_context_tokens,
            page_size_tokens=page_size,
            kv_bytes_per_token=token_bytes,
            store_capacity_tokens=self._store.capacity_tokens,
            vocabulary_size=facts.vocabulary_size,
            fingerprint=fingerprint,
            tokenizer=facts.tokenizer,
            attention_backend="modelled",
        )
        self._model = model
        self._source = TokenSource(facts, eos_every)
        self._planner = planner
        self._device = ModelledDevice(kv_capacity_tokens, page_size)
        self._requests = ActiveRequests()
        self._loop_task: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] | None = None
        self._time_line = TimeLine()
        self.sizes = PassSizes(WholeSlicing(), self._belief, parallelism, page_size)
        self._has_paused = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def kv(self) -> KvExchange[ModelledStore]:
        return self._kv

    async def start(self) -> None:
        """Start the time line."""
        await self._kv.open(0.0)
        self._lost = asyncio.get_running_loop().create_future()
        self._loop_task = asyncio.create_task(self._run(), name="modelled-engine")
        self._loop_task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """End the time line; requests in progress fail."""
        if self._loop_task:
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})
        self._fail(EngineLostError("the engine was stopped"))

    async def wait_lost(self) -> str:
        """Return, with one line, when the engine cannot serve any more."""
        if self._lost is None:
            raise RuntimeError("not started")
        return await asyncio.shield(self._lost)

    def load(self) -> EngineLoad:
        requests = [*self._requests.running, *self._requests.prefilling]
        size, context_tokens = _size(self._requests.running)
        return EngineLoad(
            running_requests=size,
            running_context_tokens=context_tokens,
            kv_used_tokens=self._device.used_tokens + sum(active.private_tokens for active in requests),
        )

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request; one output per choice and step."""
        active = self._submit(request)
        try:
            while True:
                output = await active.outputs.get()
                if isinstance(output, EngineError):
                    raise output
                yield output
                if active.finished and active.outputs.empty():
                    return
        finally:
            self._leave(active)

    # -- requests come and go

    def _submit(self, request: EngineRequest) -> ActiveRequest:
        if self._loop_task is None or self._loop_task.done():
            raise EngineLostError("the engine is not running")
        limits = OutputLimits.of(request, self._info.max_context_tokens, self._source.eos_token_ids)
        capacity = self._info.kv_capacity_tokens
        if len(request.token_ids) > capacity:
            raise EngineError(f"the prompt has {len(request.token_ids)} tokens, the KV memory holds {capacity}", 400)
        keys = page_keys(request.token_ids, self._info.page_size_tokens, request.known_keys, tenant=request.tenant)
        plan = self._planner.plan(request) if self._planner else None
        active = ActiveRequest(request, limits, keys, plan)
        self._next_rounds.begun(request.session_id, active.prompt_tokens, request.ttft_slo_s, request.max_new_tokens)
        self._store.begin(request.rid, request.session_id, active.keys, is_copy=request.is_copy)
        self._requests.alive.add(active)
        self._requests.waiting.append(active)
        self._time_line.wake()
        return active

    def _leave(self, active: ActiveRequest) -> None:
        """Take a request out wherever it is; the KV that it has computed stays in the store for its session."""
        if active.aborted.is_set():
            return
        active.aborted.set()
        self._requests.alive.discard(active)
        if active in self._requests.waiting:
            self._requests.waiting.remove(active)
        if active in self._requests.running:
            self._requests.running.remove(active)
        if active in self._requests.prefilling:
            self._requests.prefilling.remove(active)
        self._settle(active)
        self._time_line.wake()

    def _settle(self, active: ActiveRequest) -> None:
        """Store the context as far as it was computed and let the session go, once."""
        if active.settled:
            return
        active.settled = True
        request, keys = active.request, active.keys
        if active.prefilled:
            # The last token was sampled but never read, so it has no KV yet.
            context = request.token_ids + active.choices[0].tokens[:-1]
            keys = page_keys(context, self._info.page_size_tokens, keys, tenant=request.tenant)
            self._computed(active, keys)
        elif active.passed_tokens:
            self._computed(active, keys[: active.part[0] // self._info.page_size_tokens])
        self._device.leave(keys[: active.device_pages])
        self._store.end(request.rid, request.session_id, keys)

    def _computed(self, active: ActiveRequest, keys: list[bytes]) -> None:
        """The KV of all these pages is on the device now; write it through to the store."""
        self._device.use(keys[active.device_pages :])
        active.device_pages = len(keys)
        self._store.write(active.request.session_id, keys)

    # -- the time line

    async def _run(self) -> None:
        while True:
            if self._requests.waiting or self._requests.running or self._requests.prefilling:
                await self._next_pass()
            else:
                await self._time_line.pause()

    def _admit(self) -> ActiveRequest | None:
        """The next request, if the device has room for it."""
        if not self._requests.waiting:
            return None
        active, page_size = self._oldest(), self._info.page_size_tokens
        most_tokens = reusable_tokens(active.prompt_tokens, active.prompt_tokens, page_size)
        found, parallelism = self._found(active.keys), self._info.parallelism
        active.tiers = tiers_of(active.prompt_tokens, found, most_tokens)
        if active.tiers.reloaded_tokens and not reloading_pays(
            active.prompt_tokens, found.store_tokens, self._belief, parallelism
        ):
            active.tiers = tiers_of(active.prompt_tokens, found, found.device_tokens)
        device_tokens = active.tiers.device_tokens
        on_device = active.keys[: device_tokens // page_size]
        needed = min(active.reserved_tokens, self._info.kv_capacity_tokens - device_tokens)
        here = [*self._requests.running, *self._requests.prefilling]
        reserved = needed + sum(request.reserved_tokens for request in here)
        if not self._device.admit(on_device, reserved, anyway=not here):
            return None
        active.device_pages = len(on_device)
        self._requests.waiting.remove(active)
        return active

    def _oldest(self) -> ActiveRequest:
        """The request whose turn it is. Those that were taken over join the batch before others."""
        waiting, page_size = self._requests.waiting, self._info.page_size_tokens
        if self._requests.running:
            for active in waiting:
                found = self._found(active.keys)
                missing = active.prompt_tokens - max(found.device_tokens, found.store_tokens)
                if active.is_taken_over(missing, page_size) and active.limits.max_new_tokens:
                    return active
        return waiting[0]

    def _found(self, keys: list[bytes]) -> Found:
        """Where the KV of a prompt is."""
        page_size = self._info.page_size_tokens
        return Found(self._device.match(keys) * page_size, self._store.directory.match(keys) * page_size)

    def _is_prefill(self, active: ActiveRequest) -> bool:
        """False for a request that was taken over. It joins the batch."""
        missing, page_size = active.tiers.computed_tokens, self._info.page_size_tokens
        # A request without output has no step to join.
        has_no_step = missing >= page_size and not active.limits.max_new_tokens
        return has_no_step or not active.is_taken_over(missing, page_size)

    def _begin_output(self, active: ActiveRequest, *, is_prefill: bool) -> None:
        """What the request computes before its decode steps is done. A prefill brings its first tokens."""
        if is_prefill or not active.limits.max_new_tokens:
            self._prefilled(active)
        if is_prefill and active.limits.max_new_tokens:
            active.first_s = self._time_line.now_s()
            for choice in active.choices:
                active.advance(choice, self._source)
        if not active.limits.max_new_tokens:
            active.close_empty()
        if active.finished:
            self._settle(active)
        else:
            self._requests.running.append(active)

    # -- passes

    async def _next_pass(self) -> None:
        while (admitted := self._admit()) is not None:
            admitted.reload_s = self._reload_s(admitted.tiers.reloaded_tokens)
            if self._is_prefill(admitted):
                self._requests.prefilling.append(admitted)
                continue
            if admitted.reload_s:
                await self._time_line.work(admitted.reload_s)
            if not admitted.aborted.is_set():
                self._begin_output(admitted, is_prefill=False)
        parts, is_mixed = self._chosen()
        if parts:
            await self._compute(parts, is_mixed=is_mixed)
        elif self._requests.running:
            await self._decode_step()
        else:
            await self._time_line.pause()

    def _chosen(self) -> tuple[list[tuple[ActiveRequest, int]], bool]:
        """What the next pass prefills, as (request, tokens), and whether it is a step of the batch too."""
        prefilling, now_s = self._requests.prefilling, self._time_line.now_s()
        if not prefilling:
            return [], False
        left = [active.left_tokens for active in prefilling]
        running = [active.running_round(now_s) for active in self._requests.running]
        task = next((task for active in prefilling if (task := active.request.task)), None)
        oldest = task and task.with_tokens(*prefilling[0].part)
        chosen = self.sizes.next(oldest, sum(left), running, now_s, has_paused=self._has_paused)
        parts = divided(left, chosen.tokens, self._info.page_size_tokens)
        return [(prefilling[index], tokens) for index, tokens in parts], chosen.is_mixed

    async def _compute(self, parts: list[tuple[ActiveRequest, int]], *, is_mixed: bool) -> None:
        """A pass over parts of prefills."""
        _tell(parts, is_beside=bool(self._requests.running))
        beside = list(self._requests.running) if is_mixed else []
        self._has_paused = bool(self._requests.running) and not is_mixed
        sizes = [(active.part[0], tokens) for active, tokens in parts]
        computed_s = self._pass_s(sizes, beside)
        reload_s = sum(active.reload_s for active, _ in parts if not active.passed_tokens)
        only = parts[0][0].aborted if len(parts) == 1 and not beside else None
        await self._time_line.work(max(reload_s, computed_s), only)
        if only is None or not only.is_set():
            self._measure_pass(sizes, beside, computed_s)
        if is_mixed:
            self._end_step(beside)
        for active, tokens in parts:
            if active.aborted.is_set():
                continue
            active.passed_tokens += tokens
            if not active.left_tokens:
                self._requests.prefilling.remove(active)
                self._begin_output(active, is_prefill=True)

    def _pass_s(self, parts: list[tuple[int, int]], beside: list[ActiveRequest]) -> float:
        """Time of a pass over (history, increment) parts and a step of the requests beside them, if there are any."""
        return _predicted_s(self._model, parts, _size(beside), self._info.parallelism)

    # -- times

    def _measure_pass(self, parts: list[tuple[int, int]], beside: list[ActiveRequest], seconds: float) -> None:
        """A pass over parts of prefills has ended, after its modelled time: a late wake-up is no work of the engine."""
        if self._times is None:
            return
        predicted_s = _predicted_s(self._times, parts, _size(beside), self._info.parallelism)
        self._times.measured(MIXED if beside else PREFILL, predicted_s, seconds)

    def _measure_step(self, size: tuple[int, int], seconds: float) -> None:
        if self._times is not None:
            self._times.measured(STEP, self._times.decode_step_s(*size, self._info.parallelism), seconds)

    def _reload_s(self, tokens: int) -> float:
        """Time to copy KV from the store."""
        seconds = self._model.reload_s(tokens, self._info.parallelism)
        if self._times is not None:
            self._times.measured(LOAD, self._times.reload_s(tokens, self._info.parallelism), seconds)
        return seconds

    def _prefilled(self, active: ActiveRequest) -> None:
        active.prefilled = True
        self._computed(active, active.keys)

    async def _decode_step(self) -> None:
        batch = list(self._requests.running)
        size = _size(batch)
        seconds = self._model.decode_step_s(*size, self._info.parallelism)
        await self._time_line.work(seconds)
        self._measure_step(size, seconds)
        self._end_step(batch)

    def _end_step(self, batch: list[ActiveRequest]) -> None:
        """Each choice of the batch has its next token."""
        self._has_paused = False
        for active in batch:
            if active.aborted.is_set():
                continue
            if not active.prefilled:
                self._prefilled(active)
            for choice in active.decoding:
                active.advance(choice, self._source)
            if active.finished:
                self._requests.running.remove(active)
                self._settle(active)

    # -- the end

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._lost is None:
            return
        line = f"the modelled engine failed: {task.exception()!r}"
        log.error("%s", line, exc_info=task.exception())
        self._fail(EngineLostError(line, has_run=True))
        if not self._lost.done():
            self._lost.set_result(line)

    def _fail(self, error: EngineLostError) -> None:
        for active in self._requests.alive:
            active.outputs.put_nowait(error)


def _predicted_s(
    model: PerformanceModel, parts: list[tuple[int, int]], beside: tuple[int, int], parallelism: Parallelism
) -> float:
    """Time of a pass over parts of prefills, with a step of a batch that has a size and contexts."""
    if not beside[0]:
        return model.prefill_s(*joined_tokens(parts), parallelism)
    return model.mixed_pass_s(parts, *beside, parallelism)


def _size(batch: list[ActiveRequest]) -> tuple[int, int]:
    """How many choices decode, and how many tokens of KV one step of them reads."""
    return sum(len(active.decoding) for active in batch), sum(active.context_tokens for active in batch)


def _tell(parts: list[tuple[ActiveRequest, int]], *, is_beside: bool) -> None:
    """Tell the worker of the pass that begins, after it has heard of the prefills that have ended."""
    loop = asyncio.get_running_loop()
    for active, tokens in parts:
        if (on_pass := active.request.on_pass) is not None:
            left_tokens = active.left_tokens - tokens
            loop.call_soon(on_pass, left_tokens, is_beside and not left_tokens)
