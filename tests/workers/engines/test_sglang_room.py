"""Idle sessions keep no room from others: a prompt of the published context is served while they fill all KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ampd.tiny_model import make_tiny_model

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.sglang_pair import Pair, empty, pair_settings, read, rid, run, text
from workers.engines.sglang import SglangEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
]

IDLE_SESSIONS, IDLE_TOKENS = 10, 1000
SMALL = {"max_total_tokens": 4000, "kv_store_gib": 0.03}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> AsyncIterator[SglangEngine]:
    """An engine that idle sessions fill, beside the pair, from whose prefill engine it reads."""
    model = make_tiny_model(tmp_path_factory.mktemp("small") / "tiny")
    engine = SglangEngine(pair_settings(model).model_copy(update=SMALL))
    try:
        await engine.start()
        engine.kv.connect(pair.peers, lambda _session, _tokens: None)
        yield engine
    finally:
        await engine.stop()


async def fill(engine: SglangEngine) -> None:
    """Let idle sessions take all of the device's KV and all of the store."""
    for number in range(IDLE_SESSIONS):
        await run(engine, f"idle-{number}", text(200 + number, IDLE_TOKENS), 4)
    await engine.kv.store.settle(60.0)
    directory = engine.kv.store.directory
    assert directory.figures.evicted_tokens["idle"], "the store is not full"
    assert directory.session_tokens > engine.info.kv_capacity_tokens


async def test_idle_sessions_keep_no_room_from_a_prompt_of_the_whole_context(small: SglangEngine) -> None:
    await fill(small)
    whole = text(301, small.info.max_context_tokens - 1)
    long, behind = await asyncio.gather(run(small, "long", whole, 1), run(small, "behind", text(302, 50), 4))
    assert (len(long.token_ids), len(behind.token_ids)) == (1, 4)
    # What has gone is computed again, or comes back from the store.
    assert len((await run(small, "idle-0", text(200, IDLE_TOKENS), 4)).token_ids) == 4
    await empty(small)


async def test_idle_sessions_keep_no_room_from_a_read_of_the_whole_context(small: SglangEngine, pair: Pair) -> None:
    """The history of the prompt comes from another worker, so that the store needs room for all of it first."""
    await fill(small)
    whole = text(303, small.info.max_context_tokens - 1)
    (first,) = (await run(pair.prefill, "long", whole, 1)).token_ids
    await pair.prefill.kv.store.settle(60.0)
    pair.peers.workers["P"] = pair.prefill
    request_id = rid()
    fetched = await read(small, request_id, whole, "P", 60.0)
    assert fetched.error is None
    assert fetched.tokens == (len(whole) - 1) // 16 * 16
    output = await run(small, "long", whole, 1, request_id)
    assert output.cached_tokens == fetched.tokens
    assert output.token_ids == [first]
    await empty(small, pair.prefill)
