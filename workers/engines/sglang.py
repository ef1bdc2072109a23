"""SGLang as an engine: its processes, the KV exchange with its pool, and requests in Dynamo's terms."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ampd.errors import UserError, one_line_of
from ampd.keys import page_keys
from ampd.model_folder import tokenizer_digest
from ampd.perf.corrections import LOAD, CorrectedModel
from ampd.serving.kv_eviction import NextRounds
from ampd.serving.kv_tiers import reloading_pays
from ampd.types import Parallelism
from workers.engines.base import (
    EngineError,
    EngineInfo,
    EngineLoad,
    EngineLostError,
    EngineOutput,
    EngineRequest,
    KvLoadError,
    OnPass,
    output_room,
)
from workers.engines.sglang_passes import attention_backend, pass_params
from workers.engines.sglang_processes import SglangProcesses
from workers.engines.sglang_settings import (
    ENGINE_ENVIRONMENT,
    SglangSettings,
    check_sglang,
    choose_gpu,
    create_store,
    engine_arguments,
    report_page_size,
)
from workers.kv.exchange import KvExchange

if TYPE_CHECKING:
    from workers.kv.engine_store import EngineStore
    from workers.kv.peer_reads import Transport

log = logging.getLogger(__name__)

__all__ = ["SglangEngine", "SglangSettings"]

_LINK_S = 30.0
_STOP_S = 5.0
_GONE_POLL_S = 0.02
_WARM_UP_TOKENS = (300, 20)
_WARM_UP_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {
        "sampling_options": {
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.1,
            "temperature": 1.0,
            "top_k": 5,
            "top_p": 0.9,
        },
        "stop_conditions": {"min_tokens": 2},
        "output_options": {"logprobs": 2},
    },
    {"sampling_options": {"guided_decoding": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}}},
    {"sampling_options": {"guided_decoding": {"regex": "[a-z]{2}"}}},
    {"sampling_options": {"guided_decoding": {"choice": ["yes", "no"]}}},
    {"sampling_options": {"temperature": 1.0, "min_p": 0.1}},
    {"sampling_options": {"temperature": 1.0, "seed": 1}},
)
"""What requests may ask for. An engine that follows seeds refuses `min_p`, and one that does not refuses seeds."""

WARM_UP_S = 600.0
"""The longest time of the first requests. Kernels may be compiled meanwhile, which takes minutes."""


@dataclass(slots=True)
class _Running:
    """One request that the engine works on.

    Attributes:
        tokens: of its first choice.
        decodes: its first token is out.
        reload_s: how long the copies from the store took.
        is_load_measured: that time is of this request alone, and was not compared with its prediction yet.
        on_pass: as in `EngineRequest`.
    """

    context_tokens: int
    on_pass: OnPass | None
    tokens: list[int] = field(default_factory=list)
    decodes: bool = False
    reload_s: float = 0.0
    is_load_measured: bool = False

    def reloaded(self, seconds: float, requests: int) -> None:
        """The records of the request were copied to the device, together with those of other `requests`."""
        self.reload_s = seconds
        self.is_load_measured = requests == 1

    def count(self, output: EngineOutput) -> None:
        """Count the tokens of an output, and add how long its reload took."""
        if output.reloaded_tokens:
            output.reload_s = self.reload_s
        self.context_tokens += len(output.token_ids)
        self.decodes = self.decodes or bool(output.token_ids)
        if output.index == 0:
            self.tokens += output.token_ids


class SglangEngine:
    """`Engine` on SGLang, one replica.

    Args:
        settings: what to run.
        make_transport: the transport between stores, given the store's address and bytes; NIXL if None.
        model: the times of this worker, corrected by those of passes and loads. It predicts which KV of idle sessions
            may go, and whether a reload pays. None: the least recently used goes, and everything is reloaded.
        passes: the slicing policy (`slicing`), the performance model (`perf`) and the role (`role`) by which passes are
            chosen; None: SGLang chooses them by itself.

    Raises:
        UserError: SGLang cannot run what the settings say.
    """

    def __init__(
        self,
        settings: SglangSettings,
        make_transport: Callable[[int, int], Transport] | None = None,
        model: CorrectedModel | None = None,
        *,
        passes: Mapping[str, str] | None = None,
    ) -> None:
        check_sglang(settings, "sglang engine")
        self._settings = settings
        self._passes = passes
        self._is_deterministic = bool(json.loads(settings.engine_args).get("enable_deterministic_inference"))
        self._make_transport = make_transport
        self._model = model
        self._next_rounds = NextRounds(model, Parallelism(tp=settings.tp)) if model else None
        self._running: dict[str, _Running] = {}
        self._sglang: SglangProcesses | None = None
        self._kv: KvExchange[EngineStore] | None = None
        self._info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("the engine has not started", 503)
        return self._info

    @property
    def kv(self) -> KvExchange[EngineStore]:
        if self._kv is None:
            raise EngineError("the engine has not started", 503)
        return self._kv

    # -- life

    async def start(self) -> None:
        """Start SGLang's processes, meet the linker in its scheduler, warm up.

        Raises:
            EngineError: in one line, when SGLang does not start.
        """
        for name, value in ENGINE_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from workers.kv.engine_store import EngineStore
            from workers.kv.nixl_transport import NixlTransport
            from workers.kv.shared import this_host
        except ImportError as error:
            raise EngineError(
                f"{error}: the engine needs its extra: uv pip install --editable '.[sglang]' in AMPD's repository"
            ) from None
        surplus = self._next_rounds.surplus if self._next_rounds else None
        has_checksums = self._settings.kv_checksums != "off"
        store = EngineStore(
            create_store(self._settings),
            self._settings.tp,
            surplus,
            has_checksums=has_checksums,
            host="" if self._make_transport else this_host(),
        )
        store.on_passes = self._passes_begun
        if self._model is not None:
            store.on_factors = self._model.adopt
        self._kv = KvExchange(store, self._make_transport or NixlTransport)
        await self._run_processes(self._kv)

    async def restart(self) -> None:
        """Start SGLang's processes again. What they had stored stays readable, here and for other workers.

        Meanwhile this process goes on answering.

        Raises:
            EngineError: in one line, when SGLang does not start.
        """
        kv = self.kv
        await self._end_processes(grace_s=0.0)  # they may hang
        await kv.store.replace_engine()
        await self._run_processes(kv)

    async def _run_processes(self, kv: KvExchange[EngineStore]) -> None:
        self._sglang = sglang = SglangProcesses()
        try:
            await sglang.start(await asyncio.to_thread(self._arguments, kv))
            await kv.open(_LINK_S)
            self._info = self._read_info(sglang)
            await self._warm_up(sglang.lost)
            sglang.take_signals_back()
        except BaseException as error:
            # SGLang only reports that a rank has ended. The rank has told the reason.
            reason = kv.store.refusal or one_line_of(error)
            await self.stop()
            if isinstance(error, Exception) and not isinstance(error, EngineError):
                raise EngineError(f"SGLang did not start: {reason}") from error
            raise

    def _arguments(self, kv: KvExchange[EngineStore]) -> dict[str, Any]:
        on_gpu = choose_gpu(self._settings.device, self._settings.tp)
        if not on_gpu:
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        linker = {
            "control": kv.store.addresses,
            "store": kv.store.memory.place,
            "allow_untested": self._settings.allow_untested,
            "passes": self._passes,
        }
        return engine_arguments(self._settings, on_gpu=on_gpu, linker=linker)

    async def _warm_up(self, lost: asyncio.Future[str]) -> None:
        """Run the first requests, with all that requests can ask for, because SGLang compiles much of it when it is
        asked for the first time, and all rounds stand still meanwhile.

        SGLang waits for ever for requests of a process that has ended or hangs, and this does not.

        Raises:
            EngineError: a process has ended, or the requests take too long.
        """

        async def run(length: int, options: Mapping[str, Any]) -> None:
            tokens = [1 + position % 50 for position in range(min(length, self.info.max_context_tokens - 8))]
            with suppress(EngineError) if options else nullcontext():  # this engine may lack the option
                async for _ in self.generate(EngineRequest(uuid4().hex, "", tokens, 4, dict(options))):
                    pass

        async def first_requests() -> None:
            long, short = _WARM_UP_TOKENS
            await run(long, {})
            await run(short, {})
            for options in _WARM_UP_OPTIONS:
                await run(short, options)
            # Some is compiled again for a batch.
            await asyncio.gather(*(run(short, options) for options in (*_WARM_UP_OPTIONS, *_WARM_UP_OPTIONS[:1])))

        requests = asyncio.create_task(first_requests())
        either: set[asyncio.Future[Any]] = {requests, lost}
        try:
            await asyncio.wait(either, timeout=WARM_UP_S, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise EngineError(f"{lost.result()} while it warmed up")
            if not requests.done():
                raise EngineError(f"SGLang hangs: its first requests took more than {WARM_UP_S:g} s")
            await requests
        finally:
            requests.cancel()
            await asyncio.wait({requests})

    async def stop(self) -> None:
        kv, self._kv = self._kv, None
        await self._end_processes(_STOP_S, kv)

    async def _end_processes(self, grace_s: float, kv: KvExchange[EngineStore] | None = None) -> None:
        """End SGLang's part of this process, the KV exchange if it is given, then SGLang's own processes."""
        if self._sglang is not None:
            await self._sglang.end_here()
        if kv is not None:
            await kv.close()
        if self._sglang is not None:
            await self._sglang.end_children(grace_s)

    async def wait_lost(self) -> str:
        """Return, with one line, when one of SGLang's processes has ended."""
        assert self._sglang is not None
        return await asyncio.shield(self._sglang.lost)

    def _read_info(self, sglang: SglangProcesses) -> EngineInfo:
        geometry = self.kv.store.geometry
        report_page_size(self._settings, geometry.page_size)
        limits = sglang.engine._scheduler_init_result.scheduler_infos[0]
        capacity = int(limits["max_total_num_tokens"])
        # SGLang's own limit is 6 tokens below the model's context or the pool. But it admits a prompt only if its
        # pool has room for an answer and a page more. A prompt in between waits for ever, and all others behind it.
        longest = min(int(limits["max_req_input_len"]), capacity - 2 * geometry.page_size)
        return EngineInfo(
            parallelism=Parallelism(tp=self._settings.tp, host=self.kv.store.host),
            kv_capacity_tokens=capacity,
            max_context_tokens=longest,
            store_capacity_tokens=self.kv.store.capacity_tokens,
            page_size_tokens=geometry.page_size,
            kv_bytes_per_token=geometry.page_bytes // geometry.page_size,
            vocabulary_size=int(sglang.manager.model_config.vocab_size),
            fingerprint=geometry.fingerprint,
            tokenizer=tokenizer_digest(self._settings.model),
            attention_backend=attention_backend(sglang.manager.server_args),
        )

    # -- requests

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        from workers.engines.sglang_request import logprob_arguments, sampling_params

        if self._sglang is not None and self._sglang.lost.done():
            raise EngineLostError("SGLang has ended")
        # SGLang refuses a request whose limit exceeds the context, and ends one without a limit a few tokens behind it.
        request = replace(request, max_new_tokens=output_room(request, self.info.max_context_tokens))
        arguments = {
            "sampling_params": {
                **sampling_params(request, self.info.vocabulary_size, is_deterministic=self._is_deterministic),
                **pass_params(request, tells=request.choices == 1),
            },
            **logprob_arguments(request),
        }
        has_output = False
        try:
            async with aclosing(self._run(request, arguments)) as outputs:
                async for output in outputs:
                    has_output = True
                    yield output
            return
        except KvLoadError:
            if has_output:
                raise
        log.warning("the stored KV of a request did not reach the device: its context is computed again")
        # Under another id, because SGLang may load what is protected for the first one until that has ended.
        # Its last pass may have been told already.
        request = replace(request, rid=f"{request.rid}-again", on_pass=None)
        async with aclosing(self._run(request, arguments, loads=False)) as outputs:
            async for output in outputs:
                yield output

    async def _run(
        self, request: EngineRequest, arguments: dict[str, Any], *, loads: bool = True
    ) -> AsyncGenerator[EngineOutput, None]:
        """`generate`, for checked parameters; `loads`: whether stored KV may be loaded."""
        running = _Running(len(request.token_ids), request.on_pass)
        self._running[request.rid] = running
        keys = self._keys(request, request.token_ids, request.known_keys)
        if self._next_rounds:
            self._next_rounds.begun(
                request.session_id, len(request.token_ids), request.ttft_slo_s, request.max_new_tokens
            )
        try:
            await self._begin(request, keys, running, loads=loads)
            async with aclosing(self._choices(request, arguments)) as outputs:
                async for output in outputs:
                    running.count(output)
                    self._measure_load(running, output.reloaded_tokens)
                    yield output
        finally:
            self._running.pop(request.rid, None)
            if self._kv is not None:
                # The last token is sampled but not computed: it has no KV yet.
                keys = self._keys(request, [*request.token_ids, *running.tokens[:-1]], keys)
                self._kv.store.end_request(request.rid, request.session_id, keys, lambda: self._gone(request.rid))

    def _measure_load(self, running: _Running, tokens: int) -> None:
        if tokens and running.is_load_measured and self._model is not None:
            running.is_load_measured = False
            with suppress(UserError):  # the model lacks times of loads
                predicted_s = self._model.reload_s(tokens, self.info.parallelism)
                self._model.measured(LOAD, predicted_s, running.reload_s)

    async def _begin(self, request: EngineRequest, keys: Sequence[bytes], running: _Running, *, loads: bool) -> None:
        def pays(tokens: int) -> bool:
            model, prompt_tokens = self._model, len(request.token_ids)
            return loads and (model is None or reloading_pays(prompt_tokens, tokens, model, self.info.parallelism))

        try:
            await self.kv.store.begin_request(
                request.rid, request.session_id, keys, running.reloaded, pays, is_copy=request.is_copy
            )
        except (ConnectionError, TimeoutError) as error:
            raise EngineLostError(f"SGLang has ended: {error or 'it does not answer'}") from None

    def _keys(self, request: EngineRequest, context: list[int], known: Sequence[bytes]) -> list[bytes]:
        return page_keys(context, self.info.page_size_tokens, known, tenant=request.tenant)

    def _passes_begun(self, parts: Sequence[tuple[str, int, bool]]) -> None:
        for rid, left_tokens, is_last in parts:
            if (running := self._running.get(rid)) is not None and running.on_pass is not None:
                running.on_pass(left_tokens, is_last)

    def load(self) -> EngineLoad:
        running = self._running.values()
        decoding = [request.context_tokens for request in running if request.decodes]
        return EngineLoad(len(decoding), sum(decoding), sum(request.context_tokens for request in running))

    async def _choice(
        self, request: EngineRequest, rid: str, index: int, arguments: dict[str, Any]
    ) -> AsyncGenerator[EngineOutput, None]:
        """One choice, from SGLang's stream; ended early, it is aborted."""
        from workers.engines.sglang_request import output_of

        finished = False
        try:
            assert self._sglang is not None
            stream = await self._sglang.engine.async_generate(
                input_ids=request.token_ids,
                rid=rid,
                session_id=request.session_id or None,
                cache_salt=request.tenant or None,
                stream=True,
                **arguments,
            )
            async with aclosing(stream):
                async for part in stream:
                    finished = part["meta_info"].get("finish_reason") is not None
                    if (output := output_of(part, request, index)) is not None:
                        yield output
        except ValueError as error:
            finished = True
            raise EngineError(one_line_of(error), 400) from None
        finally:
            if not finished and (manager := self._manager) is not None:
                manager.abort_request(rid=rid)

    @property
    def _manager(self) -> Any:
        return self._sglang and self._sglang.manager

    async def _gone(self, rid: str) -> None:
        """Return when SGLang works on no choice of a request any more: an abort takes effect after a load."""
        while self._manager is not None and any(known.startswith(rid) for known in self._manager.rid_to_state):  # noqa: ASYNC110
            await asyncio.sleep(_GONE_POLL_S)

    async def _choices(self, request: EngineRequest, arguments: dict[str, Any]) -> AsyncGenerator[EngineOutput, None]:
        """All choices of a prompt. Where there are several, it is prefilled once, then they run together."""
        count = request.choices
        if count == 1:
            async with aclosing(self._choice(request, request.rid, 0, arguments)) as outputs:
                async for output in outputs:
                    yield output
            return
        parameters = arguments["sampling_params"]
        prefill = {"sampling_params": {"max_new_tokens": 0, "temperature": 0.0, **pass_params(request)}}
        prompt: EngineOutput | None = None
        # Under the request's own id, because the records that may be loaded are protected for it.
        async for output in self._choice(request, request.rid, 0, prefill):
            prompt = output
        queue: asyncio.Queue[EngineOutput | Exception | None] = asyncio.Queue()

        async def run(index: int) -> None:
            seed = parameters.get("sampling_seed")
            own = parameters if seed is None else {**parameters, "sampling_seed": seed + index}
            try:
                stream = self._choice(
                    request, f"{request.rid}-{index:06d}", index, {**arguments, "sampling_params": own}
                )
                async with aclosing(stream):
                    async for output in stream:
                        queue.put_nowait(output)
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(run(index)) for index in range(count)]
        try:
            left = count
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    if prompt and item.finish_reason:
                        item.cached_tokens, item.reloaded_tokens = prompt.cached_tokens, prompt.reloaded_tokens
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
