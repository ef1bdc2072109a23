"""The KV exchange between two real SGLang engines: exactly one engine's tokens, and no history computed twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ampd.tiny_model import make_tiny_model

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.workers.engines.sglang_pair import (  # noqa: E402
    PAGE,
    LocalPeers,
    Pair,
    Round,
    Script,
    SwitchedReader,
    local_round,
    play,
    remote_round,
    run,
    text,
)
from workers.engines.sglang import SglangEngine, SglangSettings  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="module"),
]

POOL_TOKENS = 24_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    model: Path = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    settings = SglangSettings(
        model=model, dtype="float32", device="cpu", max_total_tokens=POOL_TOKENS, staging_tokens=8192
    )
    pair = Pair(SglangEngine(settings, SwitchedReader), SglangEngine(settings, SwitchedReader), LocalPeers())
    try:
        await pair.prefill.start()
        await pair.decode.start()
        pair.connect()
        yield pair
    finally:
        await pair.prefill.stop()
        await pair.decode.stop()


async def one_engine(pair: Pair, script: Script) -> list[list[int]]:
    """The script on one engine alone, which is emptied afterwards."""
    tokens, rounds = await play(script, lambda _: partial(local_round, pair, f"alone-{script.seed}"))
    assert rounds[0].decode.cached_tokens == 0
    await pair.decode.kv.release_session(f"alone-{script.seed}")
    await empty(pair)
    return tokens


async def empty(pair: Pair) -> None:
    """Leave both engines without pins and without cache."""
    for engine in (pair.prefill, pair.decode):
        for session in (await engine.kv.stats())["sessions"]:
            await engine.kv.release_session(session)
        manager: Any = engine._engine.tokenizer_manager
        assert (await manager.flush_cache()).success


def route(pair: Pair, kind: str, session: str, number: int) -> Any:
    remote = kind == "remote" or (kind == "alternating" and number % 2 == 0)
    return partial(remote_round if remote else local_round, pair, session)


@pytest.mark.parametrize("kind", ["remote", "local", "alternating"])
async def test_every_route_gives_the_tokens_of_one_engine(pair: Pair, kind: str) -> None:
    script = Script(seed=1)
    alone = await one_engine(pair, script)
    tokens, rounds = await play(script, lambda number: route(pair, kind, kind, number))
    assert tokens == alone
    check_nothing_computed_twice(script, rounds)
    await empty(pair)


def check_nothing_computed_twice(script: Script, rounds: list[Round]) -> None:
    """By the engines' own counts: what was history is not computed again, on either side."""
    history = 0
    for number, one in enumerate(rounds):
        prompt = history + script.incr_tokens[number]
        computed_at_decode = one.decode.prompt_tokens - one.decode.cached_tokens
        if one.prefill is None:
            assert computed_at_decode <= script.incr_tokens[number] + PAGE
        else:
            assert one.prefill.prompt_tokens == prompt
            assert prompt - one.prefill.cached_tokens <= script.incr_tokens[number] + PAGE
            assert computed_at_decode <= PAGE + 1
            assert one.to_prefill is not None
            assert one.to_decode is not None
            assert one.to_prefill.error is None
            assert one.to_decode.error is None
            assert one.to_decode.tokens >= script.incr_tokens[number] - PAGE
        history = prompt + script.output_tokens


async def test_pages_that_were_not_moved_change_the_tokens(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(seed=2)
    alone = await one_engine(pair, script)
    monkeypatch.setattr(SwitchedReader, "moves", False)
    tokens, rounds = await play(script, lambda number: route(pair, "remote", "unmoved", number))
    assert tokens != alone
    # The engines did take those pages for the history: what failed is the content, not the books.
    assert rounds[1].decode.prompt_tokens - rounds[1].decode.cached_tokens <= PAGE + 1
    await empty(pair)


async def test_a_smoke_request(pair: Pair) -> None:
    output = await run(pair.decode, "smoke", text(9, 100), 5)
    assert len(output.token_ids) == 5
    await empty(pair)
