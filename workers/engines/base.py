"""The protocol of an inference engine, as workers use it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ampd.types import Parallelism, PrefillTask
from ampd.wire import ENGINE_DIED, with_engine_start
from workers.kv.exchange import KvExchange


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The properties of an engine, known when it has started.

    Attributes:
        kv_capacity_tokens: of the device's KV memory.
        store_capacity_tokens: of the host memory that keeps sessions between their rounds; 0: the device keeps them.
        vocabulary_size: tokens that the model knows; None: unknown, and no token id is checked.
        fingerprint: of all that its KV depends on; engines read KV from each other only if it is equal.
        tokenizer: digest of what the token ids mean; "": not known.
        attention_backend: on which the times of mixed passes depend.
    """

    parallelism: Parallelism
    kv_capacity_tokens: int
    max_context_tokens: int
    page_size_tokens: int
    kv_bytes_per_token: int
    vocabulary_size: int | None = None
    store_capacity_tokens: int = 0
    fingerprint: str = ""
    tokenizer: str = ""
    attention_backend: str = ""


OnPass = Callable[[int, bool], None]
"""Called when a pass over a prefill begins, with the tokens that are left of it after the pass, and whether it is its
last pass, beside a decode batch."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One call of the engine.

    Attributes:
        rid: unique and of fixed width (SGLang aborts by prefix).
        max_new_tokens: the context may end the output sooner; None: until EOS or the end of the context; 0: only
            prefill and publish the KV.
        request: the engine-relevant parts of Dynamo's preprocessed request (`sampling_options`, `stop_conditions`,
            `output_options`, `eos_token_ids`, ...), mapped to the engine's own parameters by the adapter.
        known_keys: keys of the prompt's first pages, so that the engine need not hash them again.
        tenant: see `ampd.keys`; the engine uses no KV of others.
        ttft_slo_s: the round's TTFT target, which tells how much of an idle session's KV may go; None: unknown.
        is_copy: another worker owns the session, so that its KV here gives way to that of this worker's sessions.
        task: what is known of its prefill, with its targets; None: it has no targets.
        first_s: when its first token came elsewhere, on the clock of the task; None: its first token comes here.
        on_pass: called when a pass over its prefill begins; None: nobody wants to know.
    """

    rid: str
    session_id: str
    token_ids: list[int]
    max_new_tokens: int | None
    request: dict[str, Any] = field(default_factory=dict)
    known_keys: Sequence[bytes] = ()
    tenant: str = ""
    ttft_slo_s: float | None = None
    is_copy: bool = False
    task: PrefillTask | None = None
    first_s: float | None = None
    on_pass: OnPass | None = None

    @property
    def choices(self) -> int:
        """How many outputs are asked for (`n`). Engines refuse what is no number."""
        options = self.request.get("sampling_options")
        number = options.get("n") if isinstance(options, dict) else None
        return number if isinstance(number, int) and number > 0 else 1


def output_room(request: EngineRequest, max_context_tokens: int) -> int:
    """How many tokens a request may add to its prompt: what it asks for, and never more than the context takes.

    A larger `max_new_tokens` is no error. An agent sends the same one in each round, and near the end of a long session
    an answer that is cut is of more use to it than none.

    Raises:
        EngineError: 400 for a prompt that is empty, or that leaves no room for an answer.
    """
    prompt_tokens = len(request.token_ids)
    if not prompt_tokens:
        raise EngineError("the prompt is empty", 400)
    room = max_context_tokens - prompt_tokens
    if room < (0 if request.max_new_tokens == 0 else 1):
        raise EngineError(f"the prompt has {prompt_tokens} tokens, the context takes {max_context_tokens}", 400)
    return room if request.max_new_tokens is None else min(request.max_new_tokens, room)


@dataclass(slots=True)
class EngineOutput:
    """New tokens of one choice. `finish_reason` is set in the choice's last output, with the engine's own counts.

    Attributes:
        cached_tokens: prompt tokens that were not computed, because their KV was on the device or in the store.
        reloaded_tokens: the part of them that came from the store. reload_s: how long that took; 0: not known.
    """

    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    log_probs: list[float] | None = None
    top_logprobs: list[list[dict[str, Any]]] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reloaded_tokens: int = 0
    reload_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The present load of an engine.

    Attributes:
        running_requests, running_context_tokens: the decode batch: requests whose first token is out.
        kv_used_tokens: device memory that requests use. What the device only caches goes when they need more.
    """

    running_requests: int
    running_context_tokens: int
    kv_used_tokens: int


class EngineError(Exception):
    """The engine refused or failed a request; `status` is the HTTP status that fits."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class KvLoadError(EngineError):
    """KV of a request's context did not reach the device. The engine can compute it."""

    def __init__(self) -> None:
        super().__init__("KV of the context did not reach the device", 503)


class EngineLostError(EngineError):
    """The engine has ended or hangs. The worker starts it again, or ends.

    Args:
        has_run: it was lost while it ran the request, which may be the reason. Otherwise it never took the request.
        start: which start of the engine was lost, from 1; None: not known. It tells one death from the next.
    """

    def __init__(self, message: str, *, has_run: bool = False, start: int | None = None) -> None:
        super().__init__(
            message if start is None else with_engine_start(message, start), ENGINE_DIED if has_run else 503
        )
        self.has_run = has_run


@runtime_checkable
class RestartableEngine(Protocol):
    """An engine that can be started again after it was lost. The KV that the worker keeps for it stays."""

    async def restart(self) -> None:
        """End what is left of the engine, and start it again. Raises `EngineError`."""
        ...


class Engine(Protocol):
    """One engine replica. `info` and `kv` may be used after `start`."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def kv(self) -> KvExchange[Any]: ...

    async def start(self) -> None:
        """Load and warm up; returns when requests can be served."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request; closing the iterator aborts it. Raises `EngineError`."""
        ...

    def load(self) -> EngineLoad:
        """Current load; cheap, no I/O."""
        ...

    async def wait_lost(self) -> str:
        """Return when the engine cannot serve any more, with one line for the log, even while no request runs."""
        ...

    async def stop(self) -> None:
        """Release everything; no process or memory is left behind."""
        ...
