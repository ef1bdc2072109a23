"""What a worker gets from coordinators and other workers, and a reader from the worker that it reads from.

The worker is real, with the modelled engine in no time. After each input it must be as before: nothing waits, runs,
is leased or held.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, cast

from ampd.handler_stream import Chunk, HandlerStream
from ampd.keys import pack_tokens
from ampd.perf.corrections import CorrectedModel
from ampd.policies.registry import create_named
from ampd.state.redis_store import StateStore
from ampd.tiny_model import tiny_model_path
from ampd.types import Parallelism
from ampd.wire import KvReply, KvRequest
from benchmarks.fuzz.mutations import changed
from benchmarks.fuzz.target import Target
from workers.engines.base import EngineError
from workers.engines.modelled import ModelledEngine
from workers.engines.modelled_tokens import read_model_folder
from workers.kv.peer_reads import Descriptor, encode_descriptor
from workers.parts import WorkerParts
from workers.settings import WorkerSettings

_REFUSALS = (EngineError, KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""What a worker's handler turns into an answer: `workers.component.Worker._guarded`."""
_KV_TOKENS = 100_000
_MOST_OUTPUTS = 200
_PROMPT = [5 + number % 200 for number in range(200)]
_ROUND: dict[str, Any] = {
    "task": {"task_id": "t", "session_id": "s", "hist_tokens": 0, "incr_tokens": 200, "arrival_s": 0.0,
             "slo": {"ttft_s": 1.0, "itl_s": 0.1}},
    "prompt": pack_tokens(_PROMPT),
    "source": None,
    "request": {"stop_conditions": {"max_tokens": 3}, "sampling_options": {"n": 1, "temperature": 0.0}},
}  # fmt: skip
_KV = (
    {"op": "lease", "keys": [b"k" * 32, b"l" * 32], "ttl_s": 5.0},
    {"op": "unlease", "lease_id": "1"},
    {"op": "match", "keys": [b"k" * 32]},
    {"op": "release_session", "session_id": "s"},
)
_LEASE = {"lease_id": "7", "matched": 3, "records": {"kv": [[0, 1, 2], [0, 64, 128]]}}


class _NoTimes:
    """A performance model in which nothing takes time, except that computing is slower than reading."""

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return 0.0

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return 0.0

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:  # noqa: ARG002
        return 0.0

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return 0.0


class _Peers:
    """Other workers, which answer what a test says."""

    reply: Any = None

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:  # noqa: ARG002
        return cast(KvReply, self.reply)


class FuzzedWorker:
    """One worker and the event loop that it runs on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._peers = _Peers()
        folder = tiny_model_path()
        self._parts = self._loop.run_until_complete(self._start(folder))

    async def _start(self, folder: Path) -> WorkerParts:
        model: Any = _NoTimes()
        engine = ModelledEngine(read_model_folder(folder), model, Parallelism(), _KV_TOKENS, _KV_TOKENS)
        settings = WorkerSettings(role="decode", engine="modelled", model=folder, log_rounds="none")
        ordering = create_named("ordering", "fcfs")
        store = cast(StateStore, None)  # nothing is published
        times = CorrectedModel(model, Parallelism())
        parts = WorkerParts("d1", settings, engine, store, times, ordering)
        await engine.start()
        engine.kv.connect(self._peers, parts.held)
        return parts

    def close(self) -> None:
        """Stop the worker."""
        self._loop.run_until_complete(self._parts.engine.stop())
        self._loop.close()

    def targets(self) -> Iterator[Target]:
        """The receivers of messages in a worker."""
        yield Target(
            "prefill request",
            lambda rng: changed(rng, _ROUND, 4),
            lambda given: self._serve("prefill", given),
            _REFUSALS,
        )
        yield Target("generate request", self._round, lambda given: self._serve("generate", given), _REFUSALS)
        yield Target("KV request", lambda rng: changed(rng, rng.choice(_KV)), self._kv, _REFUSALS)
        yield Target("KV reply", self._lease, self._fetch, ())

    def _lease(self, rng: random.Random) -> Any:
        """The answer of a worker with the same kind of KV."""
        geometry = self._parts.engine.kv.store.geometry
        return changed(rng, {**_LEASE, "descriptor": encode_descriptor(Descriptor(geometry, 0, 1 << 20, b"1"))})

    def _round(self, rng: random.Random) -> Any:
        return changed(rng, {**_ROUND, "source": rng.choice((None, ("p1", 1))), "is_prefilled": rng.random() < 0.5}, 4)

    def _serve(self, endpoint: str, request: Any) -> None:
        self._peers.reply = {"lease_id": "", "matched": 0}
        try:
            self._loop.run_until_complete(self._drain(endpoint, request))
        finally:
            self._check_is_idle()
            self._loop.run_until_complete(self._check_serves())

    async def _drain(self, endpoint: str, request: Any) -> None:
        chunks = HandlerStream[Chunk](partial(getattr(self._parts.rounds, endpoint), request))
        outputs = 0
        async with aclosing(chunks):
            async for chunk in chunks:
                outputs += len(chunk["token_ids"])
                if outputs > _MOST_OUTPUTS:
                    break  # its client leaves

    def _kv(self, request: Any) -> None:
        reply = self._loop.run_until_complete(self._parts.rounds.kv(request))
        assert isinstance(reply, dict)
        assert reply.get("matched", 0) >= 0
        if reply.get("lease_id"):
            self._loop.run_until_complete(self._parts.rounds.kv({"op": "unlease", "lease_id": reply["lease_id"]}))

    def _fetch(self, reply: Any) -> None:
        self._peers.reply = reply
        kv = self._parts.engine.kv
        keys = [bytes([number]) * 32 for number in range(8)]
        fetched = self._loop.run_until_complete(kv.fetch("rid", keys, 0, "p1", 1.0))
        self._loop.run_until_complete(kv.unprotect("rid"))
        assert 0 <= fetched.tokens <= 8 * 16

    async def _check_serves(self) -> None:
        """A valid round is served as before."""
        try:
            await self._drain("generate", _ROUND)
        except Exception as error:
            raise AssertionError("the worker serves no valid round any more") from error

    def _check_is_idle(self) -> None:
        assert self._parts.rounds.running == 0
        assert len(self._parts.queue) == 0
