"""SGLang as an engine: its own processes, the KV exchange with its pool, and requests in Dynamo's terms."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import multiprocessing
import os
import signal
import sysconfig
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from ampd.errors import one_line_of
from ampd.perf.model import PerformanceModel
from ampd.reserved_ports import reserved_ports
from ampd.serving.kv_eviction import NextRounds
from ampd.tokenizer_digest import tokenizer_digest
from ampd.types import Parallelism
from workers.engines.base import (
    EngineError,
    EngineInfo,
    EngineLoad,
    EngineLostError,
    EngineOutput,
    EngineRequest,
    KvLoadError,
    output_room,
)
from workers.engines.sglang_account import RequestAccount, Running
from workers.engines.sglang_manager import close_manager, ignore_quit
from workers.engines.sglang_plugin import ENGINE_FLAG
from workers.engines.sglang_settings import (
    ENGINE_ENVIRONMENT,
    SglangSettings,
    check_sglang,
    choose_gpu,
    create_store,
    engine_arguments,
    report_page_size,
)
from workers.engines.sglang_share import share_params
from workers.engines.sglang_warm_up import warmed_up
from workers.kv.exchange import KvExchange

if TYPE_CHECKING:
    from workers.kv.engine_store import EngineStore
    from workers.kv.peer_reads import Transport

log = logging.getLogger(__name__)

__all__ = ["SglangEngine", "SglangSettings"]

_LINK_S = 30.0
_STOP_S = 5.0
_GONE_POLL_S = 0.02
# SGLang's processes end with the thread that started them, so this one lives as long as the worker.
_launcher = ThreadPoolExecutor(1, "sglang-launch")


class SglangEngine:
    """`Engine` on SGLang, one replica.

    Args:
        settings: what to run.
        make_transport: the transport between stores, given the store's address and bytes; NIXL if None.
        model: predicts which KV of idle sessions may go, and whether a reload pays; None: the least recently used goes,
            and everything is reloaded.
        shares_passes: as in `SlicingPolicy`.
        passes: names of the slicing policy (`slicing`) and of the performance model (`perf`), by which shared passes
            get their sizes; None: SGLang cuts prefills as it does by itself.

    Raises:
        UserError: SGLang cannot run what the settings say.
    """

    def __init__(
        self,
        settings: SglangSettings,
        make_transport: Callable[[int, int], Transport] | None = None,
        model: PerformanceModel | None = None,
        *,
        shares_passes: bool = False,
        passes: Mapping[str, str] | None = None,
    ) -> None:
        check_sglang(settings, "sglang engine", shares_passes=shares_passes)
        self._settings = settings
        self._shares_passes = shares_passes
        self._passes = passes if shares_passes else None
        self._on_last_pass: dict[str, Callable[[], None]] = {}
        self._is_deterministic = bool(json.loads(settings.engine_args).get("enable_deterministic_inference"))
        self._make_transport = make_transport
        self._model = model
        self._next_rounds = NextRounds(model, Parallelism(tp=settings.tp)) if model else None
        self._running: dict[str, Running] = {}
        self._processes: list[BaseProcess] = []
        self._lost: asyncio.Future[str] | None = None
        self._engine: Any = None
        self._manager: Any = None
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
        except ImportError as error:
            raise EngineError(
                f"{error}: the engine needs its extra: uv pip install --editable '.[sglang]' in AMPD's repository"
            ) from None
        self._lost = asyncio.get_running_loop().create_future()
        surplus = self._next_rounds.surplus if self._next_rounds else None
        store = EngineStore(
            create_store(self._settings),
            self._settings.tp,
            surplus,
            has_checksums=self._settings.kv_checksums != "off",
            checks_loads=self._settings.kv_checksums == "all",
        )
        store.on_last_passes = self._last_passes_begun
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
        self._lost = asyncio.get_running_loop().create_future()
        await self._run_processes(kv)

    async def _run_processes(self, kv: KvExchange[EngineStore]) -> None:
        try:
            await self._launched(kv)
            await kv.open(_LINK_S)
            self._info = self._read_info()
            assert self._lost is not None
            await warmed_up(self, self._lost)
            self._take_signals_back()
        except BaseException as error:
            # SGLang only reports that a rank has ended. The rank has told the reason.
            reason = kv.store.refusal or one_line_of(error)
            await self.stop()
            if isinstance(error, Exception) and not isinstance(error, EngineError):
                raise EngineError(f"SGLang did not start: {reason}") from error
            raise

    async def stop(self) -> None:
        kv, self._kv = self._kv, None
        await self._end_processes(_STOP_S, kv)

    async def _end_processes(self, grace_s: float, kv: KvExchange[EngineStore] | None = None) -> None:
        """End SGLang's part of this process, the KV exchange if it is given, then SGLang's own processes."""
        loop = asyncio.get_running_loop()
        if self._lost is not None and not self._lost.done():
            self._lost.cancel()
        for process in self._processes:
            with suppress(ValueError):
                loop.remove_reader(process.sentinel)
        engine, self._engine = self._engine, None
        if engine is not None:
            atexit.unregister(engine.shutdown)
            await close_manager(engine, self._manager)
            self._manager = None
            ignore_quit()
        if kv is not None:
            await kv.close()
        processes, self._processes = self._processes, []
        for process in processes:
            process.terminate()
        for process in processes:
            await asyncio.to_thread(process.join, grace_s)
            process.kill()
            # A process that a driver holds ends late. The worker goes on answering meanwhile.
            await asyncio.to_thread(process.join)
            process.close()

    async def wait_lost(self) -> str:
        """Return, with one line, when one of SGLang's processes has ended."""
        assert self._lost is not None
        return await asyncio.shield(self._lost)

    async def _launched(self, kv: KvExchange[EngineStore]) -> None:
        """Start SGLang's processes, which takes seconds, or minutes with a large model."""
        ignore_quit()
        launch = asyncio.get_running_loop().run_in_executor(_launcher, self._launch, kv)
        try:
            await asyncio.shield(launch)
        except asyncio.CancelledError:
            await asyncio.wait({launch})  # nothing of it may begin later
            launch.exception()
            raise
        finally:
            for process in self._processes:
                asyncio.get_running_loop().add_reader(process.sentinel, self._process_ended, process)

    def _launch(self, kv: KvExchange[EngineStore]) -> None:
        os.environ[ENGINE_FLAG] = "1"
        _add_scripts_to_path()
        on_gpu = choose_gpu(self._settings.device, self._settings.tp)
        if not on_gpu:
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        from workers.engines.sglang_launch import engine_class  # imports SGLang

        # It reports every handler that is not its own as an error.
        logging.getLogger("sglang.srt.entrypoints.engine").addFilter(lambda record: "SIGQUIT" not in str(record.msg))
        before = set(multiprocessing.active_children())
        engine = engine_class(self._keep_manager)
        linker = {
            "control": kv.store.addresses,
            "store": kv.store.memory.place,
            "allow_untested": self._settings.allow_untested,
            "passes": self._passes,
        }
        arguments = engine_arguments(self._settings, on_gpu=on_gpu, linker=linker, shares_passes=self._shares_passes)
        # SGLang wants a loop on the thread that starts it, and uses none there.
        unused = asyncio.new_event_loop()
        asyncio.set_event_loop(unused)
        try:
            # Allocated first: what an engine that fails to start has opened must be closed as well.
            self._engine = engine.__new__(engine)
            # SGLang would choose a free port itself, which others could take until the first rank listens there.
            with reserved_ports("127.0.0.1", 1) as (port,):
                self._engine.__init__(**{"nccl_port": port, **arguments})
        finally:
            self._processes = [child for child in multiprocessing.active_children() if child not in before]
            asyncio.set_event_loop(None)
            unused.close()

    def _keep_manager(self, manager: Any) -> None:
        self._manager = manager

    def _process_ended(self, process: BaseProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        self._end(f"SGLang's process {process.name} ended by itself (exit code {process.exitcode})")

    def _end(self, line: str) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(line)

    def _take_signals_back(self) -> None:
        """SGLang installs handlers that end the whole process; the worker decides that itself."""
        loop = asyncio.get_running_loop()
        with suppress(ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGTERM)
            # A child that fails, and SGLang's watchdog of a child that hangs, signal before the child ends, if ever.
            loop.add_signal_handler(signal.SIGQUIT, self._end, "SGLang reports that one of its processes failed")

    def _read_info(self) -> EngineInfo:
        geometry = self.kv.store.geometry
        report_page_size(self._settings, geometry.page_size)
        limits = self._engine._scheduler_init_result.scheduler_infos[0]
        capacity = int(limits["max_total_num_tokens"])
        # SGLang's own limit is 6 tokens below the model's context or the pool. But it admits a prompt only if its
        # pool has room for an answer and a page more. A prompt in between waits for ever, and all others behind it.
        longest = min(int(limits["max_req_input_len"]), capacity - 2 * geometry.page_size)
        return EngineInfo(
            parallelism=Parallelism(tp=self._settings.tp),
            kv_capacity_tokens=capacity,
            max_context_tokens=longest,
            store_capacity_tokens=self.kv.store.capacity_tokens,
            page_size_tokens=geometry.page_size,
            kv_bytes_per_token=geometry.page_bytes // geometry.page_size,
            vocabulary_size=int(self._manager.model_config.vocab_size),
            fingerprint=geometry.fingerprint,
            tokenizer=tokenizer_digest(self._settings.model),
        )

    # -- requests

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        from workers.engines.sglang_request import logprob_arguments, sampling_params

        if self._lost is not None and self._lost.done():
            raise EngineLostError("SGLang has ended")
        # SGLang refuses a request whose limit exceeds the context, and ends one without a limit a few tokens behind it.
        request = replace(request, max_new_tokens=output_room(request, self.info.max_context_tokens))
        arguments = {
            "sampling_params": {
                **sampling_params(request, self.info.vocabulary_size, is_deterministic=self._is_deterministic),
                **share_params(request.share, tells=request.choices == 1),
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
        share = request.share and replace(request.share, on_last_pass=None)
        request = replace(request, rid=f"{request.rid}-again", share=share)
        async with aclosing(self._run(request, arguments, loads=False)) as outputs:
            async for output in outputs:
                yield output

    async def _run(
        self, request: EngineRequest, arguments: dict[str, Any], *, loads: bool = True
    ) -> AsyncGenerator[EngineOutput, None]:
        """`generate`, for checked parameters; `loads`: whether stored KV may be loaded."""
        count = request.choices
        async with RequestAccount(self, request, loads=loads) as account:
            if count == 1:
                outputs = self._choice(request, request.rid, 0, arguments)
            else:
                outputs = self._choices(request, count, arguments)
            async with aclosing(outputs):
                async for output in outputs:
                    account.count(output)
                    yield output

    def _last_passes_begun(self, rids: Sequence[str]) -> None:
        for rid in rids:
            if (on_last_pass := self._on_last_pass.pop(rid, None)) is not None:
                on_last_pass()

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
            stream = await self._engine.async_generate(
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
            if not finished and self._manager is not None:
                self._manager.abort_request(rid=rid)

    async def gone(self, rid: str) -> None:
        """Return when SGLang works on no choice of a request any more: an abort takes effect after a load."""
        while self._manager is not None and any(known.startswith(rid) for known in self._manager.rid_to_state):  # noqa: ASYNC110
            await asyncio.sleep(_GONE_POLL_S)

    async def _choices(
        self, request: EngineRequest, count: int, arguments: dict[str, Any]
    ) -> AsyncGenerator[EngineOutput, None]:
        """Several choices of one prompt: it is prefilled once, then they run together."""
        parameters = arguments["sampling_params"]
        prefill = {"sampling_params": {"max_new_tokens": 0, "temperature": 0.0, **share_params(request.share)}}
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


def _add_scripts_to_path() -> None:
    """Let SGLang find `ninja`, which it compiles with, also where the virtual environment is not activated."""
    scripts, folders = sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath).split(os.pathsep)
    if scripts not in folders:
        os.environ["PATH"] = os.pathsep.join([*folders, scripts])
