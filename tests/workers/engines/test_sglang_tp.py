"""Engines of any tensor parallelism exchange KV: the tokens of one engine, and nothing is computed twice."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ampd.tiny_model import TinyModel, make_tiny_model

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.engine_hooks import delay_rank, in_engine_processes
from tests.harness.sglang_pair import (
    PAGE,
    LocalPeers,
    Pair,
    SwitchedTransport,
    empty,
    pair_settings,
    remote_round,
    run,
    text,
)
from workers.engines.sglang import SglangEngine

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("forked"),
]

INCREMENTS = (203, 70, 33, 100, 17, 60)
NEW = 8
LONGEST_DELAY_S = 0.1


@pytest.fixture
def delayed(forked: None) -> Iterator[None]:  # noqa: ARG001
    """Rank 1 of each engine writes, loads and gets messages later than rank 0: a race does not appear by itself."""
    with in_engine_processes(delay_rank, 1, LONGEST_DELAY_S):
        yield


def model(folder: Path, kv_heads: int) -> Path:
    sizes = TinyModel(layers=2, hidden_size=128, heads=4, kv_heads=kv_heads, max_context_tokens=2048)
    return make_tiny_model(folder / f"kv-heads-{kv_heads}", sizes)


@asynccontextmanager
async def engine(folder: Path, kv_heads: int, tp: int, **more: object) -> AsyncIterator[SglangEngine]:
    made = SglangEngine(pair_settings(model(folder, kv_heads), tp).model_copy(update=more), SwitchedTransport)
    started_s = time.monotonic()
    try:
        await made.start()
        print(f"{kv_heads} KV heads, TP {tp}: started in {time.monotonic() - started_s:.1f} s")
        yield made
    finally:
        await made.stop()


@dataclass
class Conversation:
    """The prompts of a session's rounds, with the tokens that one engine gives."""

    prompts: list[list[int]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


async def alone(made: SglangEngine, seed: int = 0) -> Conversation:
    """Six rounds on one engine without KV of others, each computed whole."""
    conversation = Conversation()
    context: list[int] = []
    for number, increment in enumerate(INCREMENTS):
        prompt = context + text(seed * 100 + number, increment)
        conversation.prompts.append(prompt)
        conversation.tokens.append((await run(made, "", prompt, NEW)).token_ids)
        context = prompt + conversation.tokens[-1]
    return conversation


async def check_rounds(pair: Pair, session: str, conversation: Conversation) -> None:
    """Rounds on alternating routes give the tokens, and no history is computed again."""
    for number, (prompt, expected) in enumerate(zip(conversation.prompts, conversation.tokens, strict=True)):
        increment = new_tokens(conversation, number)
        if number % 2:
            output = await run(pair.decode, session, prompt, NEW)
            assert output.token_ids == expected
            assert len(prompt) - output.cached_tokens <= increment + PAGE
        else:
            played = await remote_round(pair, session, prompt, NEW)
            assert played.tokens == expected
            assert played.prefill is not None
            assert len(prompt) - played.prefill.cached_tokens <= increment + PAGE
            assert played.decode.prompt_tokens - played.decode.cached_tokens <= PAGE + 1


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.usefixtures("delayed")
async def test_two_engines_of_any_two_degrees(tmp_path: Path, kv_heads: int) -> None:
    async with (
        engine(tmp_path, kv_heads, 1) as first,
        engine(tmp_path, kv_heads, 2) as second,
    ):
        conversation = await alone(first)
        for prefill, decode in ((first, second), (second, first)):
            await empty(first, second)
            pair = Pair(prefill, decode, LocalPeers())
            pair.connect()
            await check_rounds(pair, f"{prefill.info.parallelism.tp}-{decode.info.parallelism.tp}", conversation)


def new_tokens(spoken: Conversation, number: int) -> int:
    """Tokens of a round's prompt that no round before had."""
    return len(spoken.prompts[number]) - (len(spoken.prompts[number - 1]) + NEW if number else 0)


@pytest.mark.parametrize("kv_heads", [2])
async def test_a_wrong_byte_changes_the_tokens(tmp_path: Path, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwitchedTransport, "moves", False)
    async with (
        # With checksums the read would fail.
        engine(tmp_path, kv_heads, 1, kv_checksums=False) as first,
        engine(tmp_path, kv_heads, 2, kv_checksums=False) as second,
    ):
        conversation = await alone(first)
        pair = Pair(first, second, LocalPeers())
        pair.connect()
        played = await remote_round(pair, "s", conversation.prompts[0], NEW)
        assert played.decode.prompt_tokens - played.decode.cached_tokens <= PAGE + 1
        assert played.tokens != conversation.tokens[0]
