"""A local prefill in slices on a real SGLang engine: the same tokens, nothing computed twice, a batch that goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from ampd.perf.presets import load_performance_model
from ampd.policies.base import Compute, Slice, SlicingPolicy, SlicingSituation, Wait
from ampd.policies.registry import create

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.sglang_pair import GREEDY, LocalPeers, Pair, empty, idle, text
from tests.waiting import until
from tests.workers.parts_lab import worker_parts
from tests.workers.slices_lab import Recorded, Script, message, out, script
from workers.engines.sglang import SglangEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
]

MODEL = load_performance_model("tiny-cpu")
PROMPT = text(5, 700)
OUTPUT_TOKENS = 24


@pytest_asyncio.fixture(loop_scope="session")
async def engine(pair: Pair) -> AsyncIterator[SglangEngine]:
    """The pair's decode engine, which tests connect to peers of their own."""
    yield pair.decode
    await empty(pair.decode)
    pair.connect()


class TokenBetween(Script):
    """Says the next answer only when the other round has got a token since the last one; until then: wait."""

    seen_tokens = 0

    def slice(self, situation: SlicingSituation) -> Slice:
        if situation.running:
            (other,) = situation.running
            if other.tokens <= self.seen_tokens:
                return Wait(0.01)
            self.seen_tokens = other.tokens
        return super().slice(situation)


class Worker:
    """A decode worker on the engine, without Dynamo."""

    def __init__(self, engine: SglangEngine, policy: SlicingPolicy) -> None:
        self.engine = Recorded(engine)
        self.held: dict[str, int] = {}
        engine.kv.connect(LocalPeers(), self.held.__setitem__)
        parts = worker_parts("D", self.engine, MODEL, slicing=policy)
        self.queue, self.rounds = parts.queue, parts.rounds
        self.other: list[int] = []

    async def round(self, prompt: list[int], new: int, session: str) -> list[dict[str, Any]]:
        request = message(prompt, new, session, sampling_options=GREEDY["sampling_options"])
        request["request"]["stop_conditions"]["ignore_eos"] = True
        async with aclosing(self.rounds.generate(request)) as chunks:
            return [chunk async for chunk in chunks]

    async def decode_beside(self, prompt: list[int], new: int) -> None:
        """Another session's round, token by token into `other`."""
        request = message(prompt, new, "other", sampling_options=GREEDY["sampling_options"])
        request["request"]["stop_conditions"]["ignore_eos"] = True
        async with aclosing(self.rounds.generate(request)) as chunks:
            async for chunk in chunks:
                self.other += chunk["token_ids"]


@pytest.mark.long
async def test_slices_give_the_tokens_of_the_whole_and_compute_nothing_twice(engine: SglangEngine) -> None:
    whole = Worker(engine, create("slicing", "whole"))
    expected = out(await whole.round(PROMPT, OUTPUT_TOKENS, "whole"))
    assert [call[:2] for call in whole.engine.calls] == [(700, OUTPUT_TOKENS)]
    alone = Worker(engine, create("slicing", "whole"))
    await alone.decode_beside(text(6, 64), 300)
    await empty(engine)

    policy = TokenBetween(iter(()))
    worker = Worker(engine, policy)
    decoding = asyncio.create_task(worker.decode_beside(text(6, 64), 300))
    await until(lambda: len(worker.other) > 5)
    worker.engine.calls.clear()
    policy.answers = iter([Compute(250), Compute(250), Compute(250)])
    chunks = await worker.round(PROMPT, OUTPUT_TOKENS, "sliced")
    assert out(chunks) == expected
    assert worker.engine.calls == [(240, 0, 0), (480, 0, 240), (700, OUTPUT_TOKENS, 480)]
    assert chunks[-1]["ampd"]["slices"] == 3
    assert chunks[-1]["ampd"]["held_tokens"] == worker.held["sliced"] == (700 + OUTPUT_TOKENS - 1) // 16 * 16
    # The other round got a token before each answer, so its batch went on; its tokens are what they would have been.
    told = [running[0].tokens for running in policy.running if running]
    assert len(told) == 4
    assert 5 < told[0] < told[1] < told[2] < told[3]
    assert policy.running[-1][0].context_tokens > 64 + 5
    await decoding
    assert worker.other == alone.other
    await empty(engine)


async def test_a_client_that_goes_between_slices_leaves_nothing(engine: SglangEngine) -> None:
    policy = script()
    worker = Worker(engine, policy)
    decoding = asyncio.create_task(worker.decode_beside(text(7, 64), 2000))
    await until(lambda: len(worker.other) > 5)
    policy.answers = iter([Compute(250), Compute(250), Wait(100.0)])
    leaver = asyncio.create_task(worker.round(PROMPT, OUTPUT_TOKENS, "leaver"))
    await until(lambda: worker.held.get("leaver") == 240 and len(policy.asked) == 4)
    leaver.cancel()
    await asyncio.wait({leaver})
    assert worker.queue.tasks() == ()
    assert len(out(await worker.round(text(8, 100), 4, "next"))) == 4
    decoding.cancel()
    await asyncio.wait({decoding})
    assert worker.rounds.running == 0
    assert engine.load().running_requests == 0
    assert await engine.kv.release_session("leaver") == 240
    await until(lambda: idle(engine))
    await empty(engine)
