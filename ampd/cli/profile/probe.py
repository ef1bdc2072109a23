"""Runs prefills, decode batches and KV moves on an engine, and times them."""

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

from ampd.page_keys import page_keys
from ampd.wire import KvReply, KvRequest
from workers.engines.base import Engine, EngineError, EngineOutput, EngineRequest

_GREEDY = {"sampling_options": {"temperature": 0.0}, "stop_conditions": {"ignore_eos": True}}
_STEPS = 16
"""Decode steps that are timed once the whole batch decodes."""
_SETTLING_TOKENS = 4
"""Output of the request that waits until a batch has left. Engines may drop aborted rounds only in the next step."""
_TOKEN_IDS = (64, 250)
_HERE, _THERE = "measured", "peer"
_TIMEOUT_S = 60.0


class LocalPeers:
    """Lets the engines of one process read KV from each other."""

    def __init__(self, engines: dict[str, Engine]) -> None:
        self._engines = engines

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        """Raises `TimeoutError`."""
        return await asyncio.wait_for(self._engines[worker_id].kv.serve(request), timeout_s)


class EngineProbe:
    """Times one engine. A second engine of the same kind is its peer for KV moves. Both must be running.

    Every measurement uses new tokens and a new session, so that no cache distorts it, and releases them afterwards.
    """

    def __init__(self, engine: Engine, peer: Engine, seed: int) -> None:
        self._engine = engine
        self._peer = peer
        self._rng = random.Random(seed)
        peers = LocalPeers({_HERE: engine, _THERE: peer})
        for side in (engine, peer):
            side.kv.connect(peers, lambda _session_id, _tokens: None)

    async def prefill_s(self, hist_tokens: int, incr_tokens: int) -> float | None:
        """Time to the first token; None if the engine's cache did not hold exactly the history."""
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
        """Median gap between tokens while the whole batch decodes; None if too few steps did."""
        batch_times_s: list[list[float]] = [[] for _ in range(batch)]
        finished = asyncio.Event()
        await asyncio.gather(
            *(self._decode(times_s, batch_times_s, finished, context_tokens) for times_s in batch_times_s)
        )
        await self._settle()
        joined_s = max((times_s[0] for times_s in batch_times_s if times_s), default=0.0)
        gaps_s = [
            after_s - before_s
            for times_s in batch_times_s
            for before_s, after_s in pairwise(times_s)
            if before_s >= joined_s
        ]
        # The last gaps belong to a batch that has already become smaller.
        return statistics.median(gaps_s) if len(gaps_s) >= batch * _STEPS // 2 else None

    async def transfer_s(self, tokens: int) -> float | None:
        """Time of a read from the peer, including the directory look-up; None if it moved too little."""
        session_id, rid, page = _name(), uuid4().hex, self._engine.info.page_size_tokens
        context = self._tokens(tokens + 1)
        try:
            await self._run(self._peer, session_id, context, 0)
            # The page of the last token is never read, because that token is always computed.
            keys = page_keys(context[:tokens], page, tenant="")
            fetched = await self._engine.kv.fetch(rid, keys, self._engine.kv.protect(rid, keys), _THERE, _TIMEOUT_S)
        finally:
            await self._engine.kv.unprotect(rid)
            await self._peer.kv.release_session(session_id)
        return fetched.seconds if fetched.error is None and fetched.tokens == tokens // page * page else None

    async def _decode(
        self, times_s: list[float], batch_times_s: list[list[float]], finished: asyncio.Event, context_tokens: int
    ) -> None:
        """One sequence of a batch. It decodes until all sequences have decoded enough steps together."""
        session_id, page = _name(), self._engine.info.page_size_tokens
        room = self._engine.info.max_context_tokens - context_tokens - page
        call = EngineRequest(uuid4().hex, session_id, self._tokens(context_tokens), min(8 * _STEPS, room), _GREEDY)
        try:
            async with aclosing(cast(AsyncGenerator[EngineOutput, None], self._engine.generate(call))) as stream:
                async for output in stream:
                    if output.token_ids:
                        times_s.append(time.perf_counter())
                    if all(batch_times_s) and all(len(others_s) > _STEPS for others_s in batch_times_s):
                        joined_s = max(others_s[0] for others_s in batch_times_s)
                        if all(sum(at_s >= joined_s for at_s in others_s) > _STEPS for others_s in batch_times_s):
                            finished.set()
                    if finished.is_set():
                        break
        finally:
            await self._engine.kv.release_session(session_id)

    async def _settle(self) -> None:
        """Wait until the engine is idle, because a step of an aborted batch would delay the next measurement."""
        session_id = _name()
        try:
            await self._run(self._engine, session_id, self._tokens(1), _SETTLING_TOKENS)
        finally:
            await self._engine.kv.release_session(session_id)

    async def _run(self, engine: Engine, session_id: str, tokens: list[int], new: int) -> EngineOutput:
        """Run one request to its end. The last output has the engine's counts."""
        last = EngineOutput([])
        call = EngineRequest(uuid4().hex, session_id, tokens, new, _GREEDY)
        async with aclosing(cast(AsyncGenerator[EngineOutput, None], engine.generate(call))) as stream:
            async for output in stream:
                last = output
        if last.finish_reason is None:
            raise EngineError("the engine ended a request without a reason")
        return last

    def _tokens(self, count: int) -> list[int]:
        first, last = _TOKEN_IDS
        return [self._rng.randint(first, last) for _ in range(count)]


def _name() -> str:
    return f"profile-{uuid4().hex}"
