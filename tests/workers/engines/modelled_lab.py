# ruff: noqa: ARG002
"""Modelled engines in one process, wired as workers are, with times that tests choose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from ampd.keys import page_keys
from ampd.perf.model import MixedPasses, PerformanceModel
from ampd.policies.slicing.whole import WholeSlicing
from ampd.serving.pass_sizes import PassSizes
from ampd.types import Parallelism, PrefillTask, Slo
from ampd.wire import KvReply, KvRequest
from workers.engines.base import EngineOutput, EngineRequest
from workers.engines.modelled import ModelledEngine
from workers.engines.modelled_tokens import read_model_folder
from workers.engines.replies import OutputPlanner
from workers.kv.exchange import KvFetch


@dataclass
class Times(PerformanceModel):
    """A performance model of constants; it notes what it was asked."""

    per_token_s: float = 0.0
    step_s: float = 0.0
    transfer_s: float = 0.0
    reload_token_s: float = 0.0
    prefills: list[tuple[int, int]] = field(default_factory=list)
    saved: float = 0.0
    steps: list[tuple[int, int]] = field(default_factory=list)
    transfers: list[int] = field(default_factory=list)

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:
        self.prefills.append((hist_tokens, incr_tokens))
        return self.per_token_s * incr_tokens

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:
        self.steps.append((batch, context_tokens))
        return self.step_s

    def mixed_passes(self, parallelism: Parallelism) -> MixedPasses:
        return MixedPasses(self.saved)

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        self.transfers.append(tokens)
        return self.transfer_s

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:
        return self.reload_token_s * tokens


class Predicted(Times):
    """The times of another model for the decisions beside an engine, which are not noted as computed."""

    def __init__(self, times: Times) -> None:
        super().__init__(transfers=times.transfers)
        self._times = times

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:
        self.prefills.append((hist_tokens, incr_tokens))
        return self._times.per_token_s * incr_tokens

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:
        return self._times.step_s

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        return self._times.kv_transfer_s(tokens, source, target)

    def mixed_passes(self, parallelism: Parallelism) -> MixedPasses:
        return self._times.mixed_passes(parallelism)

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:
        return self._times.reload_s(tokens, parallelism)


class LocalPeers:
    """`KvPeers` within one process."""

    def __init__(self) -> None:
        self.engines: dict[str, ModelledEngine] = {}
        self.calls: list[tuple[str, str]] = []

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        self.calls.append((worker_id, request["op"]))
        if worker_id not in self.engines:
            raise ConnectionError(f"worker {worker_id} cannot be reached")
        return await self.engines[worker_id].kv.serve(request)


class Lab:
    """Engines by name, all with the same times."""

    def __init__(self, folder: Path, times: Times) -> None:
        self._facts = read_model_folder(folder)
        self.times = times
        self.peers = LocalPeers()
        self.held: dict[str, dict[str, int]] = {}

    @asynccontextmanager
    async def engine(
        self,
        name: str,
        capacity: int = 100_000,
        store: int = 100_000,
        eos_every: int = 0,
        planner: OutputPlanner | None = None,
    ) -> AsyncIterator[ModelledEngine]:
        parallelism = Parallelism()
        engine = ModelledEngine(
            self._facts, self.times, parallelism, capacity, store, eos_every=eos_every, planner=planner
        )
        engine.sizes = PassSizes(WholeSlicing(), Predicted(self.times), parallelism, engine.info.page_size_tokens)
        held = self.held.setdefault(name, {})
        await engine.start()
        engine.kv.connect(self.peers, held.__setitem__)
        self.peers.engines[name] = engine
        try:
            yield engine
        finally:
            await engine.stop()


def protects_nothing(engine: ModelledEngine) -> bool:
    """Whether the store could drop everything, because no request, read or lease needs it any more; it does."""
    directory, page_size = engine.kv.store.directory, engine.info.page_size_tokens
    other = [b"%d" % number for number in range(engine.kv.store.capacity_tokens // page_size)]
    reservation = directory.reserve("", {"kv": other}, 0.0)
    if reservation is not None:
        directory.give_up(reservation.id)
    return reservation is not None and engine.load().kv_used_tokens == directory.session_tokens == 0


async def fetch(
    engine: ModelledEngine, rid: str, token_ids: list[int], source: str, timeout_s: float = 60.0
) -> KvFetch:
    keys = page_keys(token_ids, engine.info.page_size_tokens, tenant="")
    return await engine.kv.fetch(rid, keys, engine.kv.protect(rid, keys), source, timeout_s)


async def run(
    engine: ModelledEngine,
    token_ids: list[int],
    max_new_tokens: int | None,
    *,
    rid: str | None = None,
    session: str = "s",
    first_s: float | None = None,
    **request: Any,
) -> list[EngineOutput]:
    """The outputs of a request. `first_s`: when its first token, now part of its prompt, came elsewhere."""
    task = PrefillTask("t", session, 0, len(token_ids), 0.0, Slo(1.0, 0.1))
    known: Any = {} if first_s is None else {"task": task, "first_s": first_s}
    call = EngineRequest(rid or uuid4().hex, session, token_ids, max_new_tokens, request, **known)
    async with aclosing(cast(Any, engine.generate(call))) as outputs:
        return [output async for output in outputs]


def tokens(outputs: list[EngineOutput], index: int = 0) -> list[int]:
    return [token for output in outputs if output.index == index for token in output.token_ids]


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + 31 * position) % 500 + 5 for position in range(length)]
