"""Engines of any tensor parallelism exchange KV: the tokens of one engine, and nothing is computed twice."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest

from ampd.tiny_model import TinyModel, make_tiny_model

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.engine_hooks import LateRank, change_memory, in_engine_processes
from tests.harness.sglang_pair import (
    PAGE,
    TIMEOUT_S,
    LocalPeers,
    LoneWorker,
    Pair,
    SwitchedTransport,
    empty,
    idle,
    pair_settings,
    read,
    remote_round,
    rid,
    run,
    text,
    zeroed,
)
from tests.waiting import until
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
DEGREES = (1, 2, 4)
ROUTES = {"remote": (True,), "local": (False,), "alternating": (True, False)}
LONGEST_DELAY_S = 0.1
MATRIX = pytest.mark.matrix


@pytest.fixture
def late_rank() -> int:
    return 1


@pytest.fixture
def delayed(forked: None, late_rank: int, tmp_path: Path) -> Iterator[None]:  # noqa: ARG001
    """A rank of each engine is later than the others: a race does not appear by itself."""
    late = LateRank(tmp_path, LONGEST_DELAY_S)
    late.choose(late_rank)
    with late.in_engines():
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


async def check_rounds(pair: Pair, session: str, conversation: Conversation, routes: Sequence[bool]) -> None:
    """Rounds give the tokens on these routes (True: remote), and no history is computed again."""
    for number, (prompt, expected) in enumerate(zip(conversation.prompts, conversation.tokens, strict=True)):
        increment = new_tokens(conversation, number)
        if not routes[number % len(routes)]:
            output = await run(pair.decode, session, prompt, NEW)
            assert output.token_ids == expected
            assert len(prompt) - output.cached_tokens <= increment + PAGE
        else:
            played = await remote_round(pair, session, prompt, NEW)
            assert played.tokens == expected
            assert played.prefill is not None
            assert len(prompt) - played.prefill.cached_tokens <= increment + PAGE
            assert played.decode.prompt_tokens - played.decode.cached_tokens <= PAGE + 1


@pytest.mark.parametrize(("kv_heads", "late_rank"), [pytest.param(1, 1, marks=MATRIX), (2, 1), (4, 0)])
@pytest.mark.usefixtures("delayed")
async def test_two_engines_of_any_two_degrees_on_every_route(tmp_path: Path, kv_heads: int) -> None:
    async with AsyncExitStack() as stack:
        prefills = [await stack.enter_async_context(engine(tmp_path, kv_heads, tp)) for tp in (1, 2)]
        decodes = [await stack.enter_async_context(engine(tmp_path, kv_heads, tp)) for tp in (1, 2)]
        conversation = await alone(prefills[0])
        await empty(prefills[0])
        for prefill, decode in product(prefills, decodes):
            pair = Pair(prefill, decode, LocalPeers())
            pair.connect()
            for name, routes in ROUTES.items():
                if name == "local" and prefill is prefills[1]:
                    continue  # the prefill worker has no part in it
                session = f"{prefill.info.parallelism.tp} x {decode.info.parallelism.tp} {name}"
                await check_rounds(pair, session, conversation, routes)
                if name == "alternating":
                    await check_zeroed_context_matters(pair, conversation, session)
                await empty(prefill, decode)


@pytest.mark.parametrize("factor", [2.0, 0.5])
async def test_memory_that_others_free_or_take_while_an_engine_starts_is_no_failure(
    tmp_path: Path, factor: float
) -> None:
    """SGLang's checks that all GPUs are equally free, and that weights leave room for KV, would refuse it."""
    with in_engine_processes(change_memory, factor):
        async with engine(tmp_path, kv_heads=2, tp=2) as made:
            assert len((await run(made, "", text(0, 20), NEW)).token_ids) == NEW


@pytest.mark.parametrize(
    ("tp", "kv_heads"), [(1, 8), (2, 2), *(pytest.param(*cell, marks=MATRIX) for cell in ((4, 8), (8, 2)))]
)
@pytest.mark.usefixtures("delayed")
async def test_eight_ranks_exchange_kv_with_any_number(tmp_path: Path, tp: int, kv_heads: int) -> None:
    """With one KV head per rank, and with groups of ranks that hold the same head."""
    sizes = TinyModel(layers=2, hidden_size=128, heads=8, kv_heads=kv_heads, max_context_tokens=2048)
    folder = make_tiny_model(tmp_path / "eight-heads", sizes)
    other, eight = (SglangEngine(pair_settings(folder, degree), SwitchedTransport) for degree in (tp, 8))
    try:
        await other.start()
        await eight.start()
        conversation = await alone(other)
        await empty(other)
        pairs = {f"{tp} x 8": (other, eight), f"8 x {tp}": (eight, other)}  # of two equal degrees one pair is enough
        for name, (prefill, decode) in pairs.items():
            pair = Pair(prefill, decode, LocalPeers())
            pair.connect()
            await check_rounds(pair, name, conversation, ROUTES["alternating"])
            await check_zeroed_context_matters(pair, conversation, name)
            await empty(other, eight)
    finally:
        await eight.stop()
        await other.stop()


@pytest.mark.matrix
@pytest.mark.usefixtures("delayed")
async def test_all_pairs_of_degrees_with_one_engine_at_a_time(tmp_path: Path) -> None:
    """Each prefill worker serves each decode worker: rounds 0 and 3 are remote, the others local."""
    peers = LocalPeers()
    prefills, decodes = (
        {tp: LoneWorker(pair_settings(model(tmp_path, kv_heads=2), tp), peers, f"{role}{tp}") for tp in DEGREES}
        for role in "PD"
    )
    try:
        async with prefills[1].awake() as made:
            conversations = [await alone(made, seed) for seed in range(len(DEGREES))]
        for remote in (0, 3):
            for tp, worker in prefills.items():
                async with worker.awake() as made:
                    for other in DEGREES:
                        cell = Cell(f"{tp} x {other}", conversation_of(conversations, tp, other))
                        await check_prefill(made, cell, remote, f"D{other}")
            for tp, worker in decodes.items():
                async with worker.awake() as made:
                    for other in DEGREES:
                        cell = Cell(f"{other} x {tp}", conversation_of(conversations, other, tp))
                        await check_decode(made, cell, remote, f"P{other}")
                        for local in (remote + 1, remote + 2):
                            await check_local(made, cell, local)
    finally:
        for worker in (*prefills.values(), *decodes.values()):
            await worker.stop()


@dataclass
class Cell:
    """A prefill worker and a decode worker, with the session that they share."""

    session: str
    conversation: Conversation


def conversation_of(conversations: list[Conversation], prefill_tp: int, decode_tp: int) -> Conversation:
    """The sessions of one worker have different texts, because its store keeps equal KV once."""
    return conversations[(DEGREES.index(prefill_tp) + DEGREES.index(decode_tp)) % len(DEGREES)]


async def check_prefill(made: SglangEngine, cell: Cell, number: int, source: str) -> None:
    """The prefill worker's part of a round: it computes only what the decode worker's store lacks of the history."""
    prompt, expected, request = cell.conversation.prompts[number], cell.conversation.tokens[number], rid()
    if number:
        await check_read(made, cell.session, prompt, source, request)
    output = await run(made, cell.session, prompt, 1, request)
    assert output.token_ids == expected[:1], (cell.session, number)
    assert len(prompt) - output.cached_tokens <= new_tokens(cell.conversation, number) + PAGE, (cell.session, number)
    if number:
        await check_zeroed_history_matters(made, prompt, expected, output.cached_tokens, cell.session)


async def check_decode(made: SglangEngine, cell: Cell, number: int, source: str) -> None:
    """The decode worker's part of the same round: the prompt's KV comes from the prefill worker."""
    first, *rest = cell.conversation.tokens[number]
    prompt, request = [*cell.conversation.prompts[number], first], rid()
    await check_read(made, cell.session, prompt, source, request)
    output = await run(made, cell.session, prompt, NEW - 1, request)
    assert output.token_ids == rest, (cell.session, number)
    assert len(prompt) - output.cached_tokens <= PAGE + 1, (cell.session, number)
    await check_zeroed_history_matters(made, prompt, rest, output.cached_tokens, cell.session)


async def check_local(made: SglangEngine, cell: Cell, number: int) -> None:
    """A round of the decode worker alone."""
    prompt = cell.conversation.prompts[number]
    output = await run(made, cell.session, prompt, NEW)
    assert output.token_ids == cell.conversation.tokens[number], (cell.session, number)
    assert len(prompt) - output.cached_tokens <= new_tokens(cell.conversation, number) + PAGE, (cell.session, number)


async def check_read(made: SglangEngine, session: str, prompt: list[int], source: str, request: str) -> None:
    fetched = await read(made, request, prompt, source, TIMEOUT_S)
    assert fetched.error is None
    assert fetched.bytes, (session, source)


async def check_zeroed_history_matters(
    made: SglangEngine, prompt: list[int], expected: list[int], cached_tokens: int, session: str
) -> None:
    """The control: the same request gives other tokens from a store of zeros, and loads as much."""
    await made.kv.store.settle(TIMEOUT_S)
    await until(lambda: idle(made), TIMEOUT_S)
    with zeroed(made, "kv", prompt):
        output = await run(made, "", prompt, NEW)
    assert output.cached_tokens == output.reloaded_tokens >= cached_tokens, session
    assert output.token_ids[: len(expected)] != expected, session
    await until(lambda: idle(made), TIMEOUT_S)


async def check_zeroed_context_matters(pair: Pair, conversation: Conversation, session: str) -> None:
    """The control on both sides, with the prompt of the last remote round of alternating routes."""
    prompt, expected = conversation.prompts[-2], conversation.tokens[-2]
    for made in (pair.prefill, pair.decode):
        await check_zeroed_history_matters(made, prompt, expected, len(prompt) // 2, session)


def new_tokens(spoken: Conversation, number: int) -> int:
    """Tokens of a round's prompt that no round before had."""
    return len(spoken.prompts[number]) - (len(spoken.prompts[number - 1]) + NEW if number else 0)
