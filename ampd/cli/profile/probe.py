"""An engine under measurement: brings about prefills, decode batches and KV moves, and times them."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise
from typing import cast
from uuid import uuid4

from ampd.wire import KvReply, KvRequest
from workers.engines.base import Engine, EngineError, EngineOutput, EngineRequest

_GREEDY = {"sampling_options": {"temperature": 0.0}, "stop_conditions": {"ignore_eos": True}}
_STEPS = 16
"""Decode steps that are timed, from the moment on when the whole batch decodes."""
_SETTLING_TOKENS = 4
"""Output of the request that waits for a batch to leave; engines may drop what was cut short only in the next step."""
_TOKEN_IDS = (64, 250)
_HERE, _THERE = "measured", "peer"
_TIMEOUT_S = 60.0


class LocalPeers:
    """The engines of one process as peers of each other."""

    def __init__(self, engines: dict[str, Engine]) -> None:
        self._engines = engines

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        """Raises `TimeoutError`."""
        return await asyncio.wait_for(self._engines[worker_id].kv.serve(request), timeout_s)


class EngineProbe:
    """Times one engine; another one of the same kind is its peer for KV moves. Both have been started.

    Every measurement has tokens and a session of its own, so that no cache helps where none should, and leaves nothing
    behind.
    """

    def __init__(self, engine: Engine, peer: Engine, seed: int) -> None:
        self._engine = engine
        self._peer = peer
        self._rng = random.Random(seed)
        peers = LocalPeers({_HERE: engine, _THERE: peer})
        for one in (engine, peer):
            one.kv.connect(peers, lambda _session_id, _tokens: None)

    async def prefill_s(self, hist_tokens: int, incr_tokens: int) -> float | None:
        """Time to the first token; None if the history was not in the engine's cache, or more than it."""
        session_id, tokens = _name(), self._tokens(hist_tokens + incr_tokens)
        try:
            if hist_tokens:
                await self._run(self._engine, session_id, tokens[:hist_tokens], 0)
            start_s = time.perf_counter()
            output = await self._run(self._engine, session_id, tokens, 1)
            seconds = time.perf_counter() - start_s
        finally:
            await self._engine.kv.release_session(session_id)
        return seconds if output.cached_tokens == hist_tokens else None

    async def decode_step_s(self, batch: int, context_tokens: int) -> float | None:
        """Median gap between tokens while the whole batch decodes; None if it never did."""
        seen: list[list[float]] = [[] for _ in range(batch)]
        everyone = asyncio.Event()
        await asyncio.gather(*(self._decode(times_s, seen, everyone, context_tokens) for times_s in seen))
        await self._settle()
        joined_s = max((times_s[0] for times_s in seen if times_s), default=0.0)
        gaps_s = [
            after_s - before_s for times_s in seen for before_s, after_s in pairwise(times_s) if before_s >= joined_s
        ]
        # The last gaps are those of a batch that others have left already.
        return statistics.median(gaps_s) if len(gaps_s) >= batch * _STEPS // 2 else None

    async def transfer_s(self, tokens: int) -> float | None:
        """Time of a read from the peer, directory look-up included; None if it moved less than asked."""
        session_id, rid = _name(), uuid4().hex
        context = self._tokens(tokens + 1)  # the page of the last token is never read: that token is always computed
        try:
            await self._run(self._peer, session_id, context, 0)
            fetched = await self._engine.kv.fetch(rid, session_id, context, _THERE, _TIMEOUT_S)
        finally:
            await self._engine.kv.discard(rid)
            await self._peer.kv.release_session(session_id)
        page = self._engine.info.page_size_tokens
        return fetched.seconds if fetched.error is None and fetched.tokens == tokens // page * page else None

    async def _decode(
        self, times_s: list[float], seen: list[list[float]], everyone: asyncio.Event, context_tokens: int
    ) -> None:
        """One sequence of a batch: goes on until all of them have decoded long enough together."""
        session_id, page = _name(), self._engine.info.page_size_tokens
        room = self._engine.info.max_context_tokens - context_tokens - page
        call = EngineRequest(uuid4().hex, session_id, self._tokens(context_tokens), min(8 * _STEPS, room), _GREEDY)
        try:
            async with aclosing(cast(AsyncGenerator[EngineOutput, None], self._engine.generate(call))) as stream:
                async for output in stream:
                    if output.token_ids:
                        times_s.append(time.perf_counter())
                    if all(seen) and all(len(one) > _STEPS for one in seen):
                        joined_s = max(one[0] for one in seen)
                        if all(sum(at_s >= joined_s for at_s in one) > _STEPS for one in seen):
                            everyone.set()
                    if everyone.is_set():
                        break
        finally:
            await self._engine.kv.release_session(session_id)

    async def _settle(self) -> None:
        """Wait until the engine is idle: a step of a batch that was cut short would delay what is measured next."""
        session_id = _name()
        try:
            await self._run(self._engine, session_id, self._tokens(1), _SETTLING_TOKENS)
        finally:
            await self._engine.kv.release_session(session_id)

    async def _run(self, engine: Engine, session_id: str, tokens: list[int], new: int) -> EngineOutput:
        """One request to its end; the last output has the engine's counts."""
        last = EngineOutput([])
        call = EngineRequest(uuid4().hex, session_id, tokens, new, _GREEDY)
        async with aclosing(cast(AsyncGenerator[EngineOutput, None], engine.generate(call))) as stream:
            async for output in stream:
                last = output
        if last.finish_reason is None:
            raise EngineError("the engine ended a request without saying why")
        return last

    def _tokens(self, count: int) -> list[int]:
        first, last = _TOKEN_IDS
        return [self._rng.randint(first, last) for _ in range(count)]


def _name() -> str:
    return f"profile-{uuid4().hex}"
