"""What the SGLang engine keeps of a request while it runs: its load, its session's KV, and the pages that it loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ampd.page_keys import page_keys
from ampd.perf.model import PerformanceModel
from ampd.serving.kv_eviction import NextRounds
from ampd.serving.kv_tiers import reloading_pays
from workers.engines.base import EngineInfo, EngineLostError, EngineOutput, EngineRequest

if TYPE_CHECKING:
    from workers.kv.engine_store import EngineStore
    from workers.kv.exchange import KvExchange


@dataclass(slots=True)
class Running:
    """One request that the engine works on: what it adds to the load. `decodes`: its first token is out."""

    context_tokens: int
    decodes: bool = False


class AccountedEngine(Protocol):
    """What an account needs of `SglangEngine`."""

    _running: dict[str, Running]
    _on_last_pass: dict[str, Callable[[], None]]
    _next_rounds: NextRounds | None
    _model: PerformanceModel | None
    _kv: KvExchange[EngineStore] | None

    @property
    def info(self) -> EngineInfo: ...

    @property
    def kv(self) -> KvExchange[EngineStore]: ...

    async def gone(self, rid: str) -> None:
        """Return when SGLang works on no choice of a request any more."""
        ...


class RequestAccount:
    """Accounts for one request while it runs: its load, its session's KV, the pages that it loads, if it may."""

    def __init__(self, engine: AccountedEngine, request: EngineRequest, *, loads: bool) -> None:
        self._engine = engine
        self._request = request
        self._loads = loads
        self._tokens: list[int] = []
        self._keys: Sequence[bytes] = ()
        self._reload_s = 0.0

    async def __aenter__(self) -> RequestAccount:
        request, engine = self._request, self._engine
        self._keys = self._keys_of(request.token_ids, request.known_keys)
        engine._running[request.rid] = Running(len(request.token_ids))
        if request.share is not None and request.share.on_last_pass is not None:
            engine._on_last_pass[request.rid] = request.share.on_last_pass
        if engine._next_rounds:
            engine._next_rounds.begun(
                request.session_id, len(request.token_ids), request.ttft_slo_s, request.max_new_tokens
            )
        try:
            rid, session_id, is_copy = request.rid, request.session_id, request.is_copy
            await engine.kv.store.begin_request(
                rid, session_id, self._keys, self._reloaded, self._reloading_pays, is_copy=is_copy
            )
        except BaseException as error:  # also a client that leaves meanwhile: Python does not call __aexit__ then
            await self.__aexit__()
            if isinstance(error, ConnectionError | TimeoutError):
                raise EngineLostError(f"SGLang has ended: {error or 'it does not answer'}") from None
            raise
        return self

    def _reloading_pays(self, tokens: int) -> bool:
        model, prompt_tokens = self._engine._model, len(self._request.token_ids)
        if not self._loads:
            return False
        return model is None or reloading_pays(prompt_tokens, tokens, model, self._engine.info.parallelism)

    def _reloaded(self, seconds: float) -> None:
        self._reload_s = seconds

    def count(self, output: EngineOutput) -> None:
        """Count the tokens of an output, and add how long its reload took."""
        if output.reloaded_tokens:
            output.reload_s = self._reload_s
        running = self._engine._running[self._request.rid]
        running.context_tokens += len(output.token_ids)
        running.decodes = running.decodes or bool(output.token_ids)
        if output.index == 0:
            self._tokens += output.token_ids

    async def __aexit__(self, *_: object) -> None:
        request, engine = self._request, self._engine
        engine._running.pop(request.rid, None)
        engine._on_last_pass.pop(request.rid, None)
        if engine._kv is None:
            return
        # The last token is sampled but not computed: it has no KV yet.
        context = [*request.token_ids, *self._tokens[:-1]]
        keys = self._keys_of(context, self._keys)
        engine.kv.store.end_request(request.rid, request.session_id, keys, lambda: engine.gone(request.rid))

    def _keys_of(self, context: list[int], known: Sequence[bytes]) -> list[bytes]:
        return page_keys(context, self._engine.info.page_size_tokens, known, tenant=self._request.tenant)
