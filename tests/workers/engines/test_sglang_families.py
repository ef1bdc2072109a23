"""Models of each family of KV pools exchange KV between real engines: equal tokens, and nothing is computed twice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.harness.tiny_families import make_family

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.cpu_families import ENGINE_ARGUMENTS, cpu_family
from tests.harness.sglang_cells import Model, check_cells
from tests.harness.sglang_pair import (
    GREEDY,
    TIMEOUT_S,
    LocalPeers,
    Pair,
    SwitchedTransport,
    empty,
    idle,
    local_round,
    pair_settings,
    remote_round,
    run,
    text,
    zeroed,
)
from tests.waiting import until
from workers.engines.sglang import SglangEngine

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("forked"),
]

INCREMENTS = (203, 70, 33, 100, 17, 60)
NEW = 8
LONG = 24
ROUTES = {"remote": (True,), "local": (False,), "alternating": (True, False)}
STATE_TOKENS = 64
"""SGLang keeps the state of a gated delta net at multiples of this, and decoding 8 tokens keeps none."""

FP8 = {"kv_cache_dtype": "fp8_e4m3"}

CELLS: list[tuple[str, int, int, tuple[str, ...], int, dict[str, Any]]] = [
    ("gpt_oss", 1, 1, ("kv", "swa"), 16, {}),
    ("gpt_oss", 1, 2, ("kv", "swa"), 16, {}),
    ("gpt_oss", 2, 1, ("kv", "swa"), 16, {}),
    # At one TP: the sums of two TPs differ in their last bits, and rounding to fp8 makes other tokens of that.
    ("gpt_oss", 1, 1, ("kv", "swa"), 16, FP8),
    ("qwen3_next", 1, 1, ("kv", "mamba"), 16, {}),
    ("qwen3_next", 2, 1, ("kv", "mamba"), 16, {}),
]
"""Family, TP of the prefill worker, TP of the decode worker, pools, page size, further arguments of SGLang."""


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    # Some of MLA's attention backends on GPUs run no other pages.
    "deepseek_v3": {"page_size": 64},
    "gemma_4": {"pools": ("kv", "swa")},
}
"""Families whose pairs share engines, with what is not as in a plain model."""


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_pair_of_two_degrees_exchanges_all_pools(family: str, tmp_path: Path) -> None:
    model = Model(partial(make_family, family=family), family=family, **FAMILIES[family])
    await check_cells(model, tmp_path, list(product((1, 2), (1, 2))))


@asynccontextmanager
async def pair_of(
    folder: Path, family: str, degrees: Sequence[int], page_size: int, arguments: dict[str, Any]
) -> AsyncIterator[Pair]:
    made = make_family(folder / family, family)
    more = {"engine_args": json.dumps(ENGINE_ARGUMENTS.get(family, {}) | arguments), "page_size": page_size}
    engines = [SglangEngine(pair_settings(made, tp).model_copy(update=more), SwitchedTransport) for tp in degrees]
    async with AsyncExitStack() as stack:
        stack.enter_context(cpu_family(family))
        for engine in engines:
            stack.push_async_callback(engine.stop)
            await engine.start()
        pair = Pair(engines[0], engines[1], LocalPeers())
        pair.connect()
        yield pair


async def forget_device(pair: Pair) -> None:
    """Only the stores know the past from here on."""
    for engine in (pair.prefill, pair.decode):
        await engine.kv.store.settle(TIMEOUT_S)
        await until(lambda engine=engine: idle(engine), TIMEOUT_S)


async def alone(engine: SglangEngine) -> list[tuple[list[int], list[int]]]:
    """Prompts and tokens of six rounds on one engine that computes each of them whole."""
    rounds: list[tuple[list[int], list[int]]] = []
    context: list[int] = []
    for number, increment in enumerate(INCREMENTS):
        prompt = context + text(number, increment)
        output = await run(engine, "", prompt, NEW)
        assert not output.cached_tokens
        rounds.append((prompt, output.token_ids))
        context = prompt + output.token_ids
        await until(lambda: idle(engine), TIMEOUT_S)
    return rounds


async def check_route(
    pair: Pair, session: str, rounds: list[tuple[list[int], list[int]]], routes: Sequence[bool], slack: int
) -> None:
    """Rounds from the stores alone give the tokens, and recompute at most `slack` tokens of what was computed."""
    history = 0
    for number, (prompt, expected) in enumerate(rounds):
        is_remote = routes[number % len(routes)]
        played = await (remote_round if is_remote else local_round)(pair, session, prompt, NEW)
        first = played.prefill or played.decode
        assert played.tokens == expected, (session, number)
        assert len(prompt) - first.cached_tokens <= len(prompt) - history + slack, (session, number)
        if is_remote:
            assert played.decode.prompt_tokens - played.decode.cached_tokens <= slack + 1, (session, number)
        history = len(prompt) + NEW
        await forget_device(pair)


@pytest.mark.parametrize(("family", "prefill_tp", "decode_tp", "pools", "page_size", "arguments"), CELLS)
async def test_a_family_exchanges_all_its_pools(
    tmp_path: Path,
    family: str,
    prefill_tp: int,
    decode_tp: int,
    pools: tuple[str, ...],
    page_size: int,
    arguments: dict[str, Any],
) -> None:
    slack = STATE_TOKENS + NEW if "mamba" in pools else page_size
    async with pair_of(tmp_path, family, (prefill_tp, decode_tp), page_size, arguments) as pair:
        assert tuple(pool.name for pool in pair.decode.kv.store.geometry.pools) == pools
        rounds = await alone(pair.decode)
        for name, routes in ROUTES.items():
            await empty(pair.prefill, pair.decode)
            await check_route(pair, name, rounds, routes, slack)
        for pool in pools:
            await empty(pair.prefill, pair.decode)
            (first, tokens), (second, expected) = rounds[:2]
            assert (await remote_round(pair, pool, first, NEW)).tokens == tokens
            await forget_device(pair)
            intact = await restored_output(pair, second)
            assert intact[0][:NEW] == expected
            with zeroed(pair.decode, pool, second):
                changed = await restored_output(pair, second)
            assert changed[0] != intact[0] or abs(changed[1] - intact[1]) > 0.01, pool


async def restored_output(pair: Pair, prompt: list[int]) -> tuple[list[int], float]:
    """Tokens, and the log-probability of the last one, of a request that loads from the store and leaves nothing.

    Some random weights change the log-probabilities with a pool's KV, but no greedy token.
    """
    request = {**GREEDY, "output_options": {"logprobs": 0}}
    output = await run(pair.decode, "", prompt, LONG, **request)
    assert output.cached_tokens >= len(prompt) // 2
    assert output.log_probs
    await forget_device(pair)
    return output.token_ids, output.log_probs[-1]
