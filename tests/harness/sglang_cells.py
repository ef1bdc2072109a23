"""The cells of a matrix: pairs of a prefill and a decode engine of several degrees, each pair on every route.

Engines take seconds to start, so the pairs share them. A pair's routes, its delays and its controls share the sessions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cpu_families import ENGINE_ARGUMENTS, cpu_family
from tests.harness.engine_hooks import delay_loads, delay_rank, in_engine_processes
from tests.harness.sglang_pair import (
    GREEDY,
    PAGE,
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
from workers.engines.base import EngineOutput
from workers.engines.sglang import SglangEngine

INCREMENTS = (203, 70, 33, 100, 17, 60)
NEW = 8
ROUTES = {"remote": (True,), "local": (False,), "alternating": (True, False)}
LONGEST_DELAY_S = 0.05
LONGEST_LOAD_DELAY_S = 0.1
STATE_TOKENS = 64
"""SGLang keeps the state of a gated delta net at multiples of this, and decoding 8 tokens keeps none."""


@dataclass(frozen=True)
class Model:
    """A model, and how the engines of a matrix run it.

    Attributes:
        make: writes the model into a folder, and returns the folder.
        pools: the KV pools that SGLang has for it.
        family: see `tests.harness.cpu_families`.
    """

    make: Callable[[Path], Path]
    pools: tuple[str, ...] = ("kv",)
    page_size: int = PAGE
    family: str = "qwen3"
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def slack_tokens(self) -> int:
        """The most tokens of a history that may be computed again."""
        return STATE_TOKENS + NEW if "mamba" in self.pools else self.page_size

    def engine(self, folder: Path, tp: int) -> SglangEngine:
        """An engine that has not started."""
        arguments = ENGINE_ARGUMENTS.get(self.family, {}) | self.arguments
        more = {"page_size": self.page_size, "engine_args": json.dumps(arguments)}
        return SglangEngine(pair_settings(folder, tp).model_copy(update=more), SwitchedTransport)


@dataclass(frozen=True)
class Reference:
    """The rounds of a session as one engine computes them, each prompt whole."""

    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[EngineOutput] = field(default_factory=list)


async def check_cells(model: Model, folder: Path, pairs: Sequence[tuple[int, int]]) -> None:
    """Let engines of these degrees (prefill, decode) exchange the KV of sessions.

    Rank 1 of each engine gets messages, writes and loads later than rank 0, and all loads begin late: a race does not
    appear by itself.
    """
    made = model.make(folder / "model")
    async with AsyncExitStack() as stack:
        stack.enter_context(cpu_family(model.family))
        stack.enter_context(in_engine_processes(delay_rank, 1, LONGEST_DELAY_S))
        stack.enter_context(in_engine_processes(delay_loads, LONGEST_LOAD_DELAY_S))
        prefills, decodes = [
            {tp: await _started(stack, model.engine(made, tp)) for tp in sorted({pair[side] for pair in pairs})}
            for side in (0, 1)
        ]
        first = next(iter(prefills.values()))
        assert tuple(pool.name for pool in first.kv.store.geometry.pools) == model.pools
        reference = await _alone(first)
        for decode in decodes.values():
            await _check_that_reads_matter(_connected(first, decode), reference)
        for prefill_tp, decode_tp in pairs:
            pair = _connected(prefills[prefill_tp], decodes[decode_tp])
            for name, routes in ROUTES.items():
                if name == "local" and prefill_tp != pairs[0][0]:
                    continue  # the prefill worker has no part in it
                if name != "alternating" and max(prefill_tp, decode_tp) > 2:
                    continue  # more ranks than cores
                await empty(pair.prefill, pair.decode)
                # On alternating routes the devices keep what they have, as they do in use.
                only_stores = name != "alternating"
                session = f"{prefill_tp} x {decode_tp} {name}"
                await _check_route(pair, session, reference, routes, model.slack_tokens, only_stores=only_stores)
                if name == "alternating":
                    for engine in (pair.prefill, pair.decode):
                        await _check_that_pools_matter(engine, reference, model.pools, session)


async def _started(stack: AsyncExitStack, engine: SglangEngine) -> SglangEngine:
    stack.push_async_callback(engine.stop)
    await engine.start()
    return engine


def _connected(prefill: SglangEngine, decode: SglangEngine) -> Pair:
    pair = Pair(prefill, decode, LocalPeers())
    pair.connect()
    return pair


async def _alone(engine: SglangEngine) -> Reference:
    """The session's rounds on one engine, without a store."""
    reference = Reference()
    context: list[int] = []
    for number, increment in enumerate(INCREMENTS):
        prompt = context + text(number, increment)
        output = await _with_log_probs(engine, prompt)
        assert not output.cached_tokens
        reference.prompts.append(prompt)
        reference.outputs.append(output)
        context = prompt + output.token_ids
    return reference


async def _check_route(
    pair: Pair, session: str, reference: Reference, routes: Sequence[bool], slack: int, *, only_stores: bool
) -> None:
    """Rounds give the tokens of the reference, and compute at most `slack` tokens of what was computed before.

    Args:
        routes: whether a round is remote; they repeat.
        only_stores: the devices forget each round, so that all history comes from the stores.
    """
    history = 0
    for number, (prompt, expected) in enumerate(zip(reference.prompts, reference.outputs, strict=True)):
        is_remote = routes[number % len(routes)]
        played = await (remote_round if is_remote else local_round)(pair, session, prompt, NEW)
        first = played.prefill or played.decode
        assert played.tokens == expected.token_ids, (session, number)
        assert first.cached_tokens >= history - slack, (session, number)
        if is_remote:
            assert played.decode.prompt_tokens - played.decode.cached_tokens <= slack + 1, (session, number)
        history = len(prompt) + NEW
        if only_stores:
            await _forget_device(pair.prefill, pair.decode)


async def _check_that_pools_matter(
    engine: SglangEngine, reference: Reference, pools: Sequence[str], session: str
) -> None:
    """The control: with the records of a pool zeroed, a context from the store gives another output."""
    prompt, expected = reference.prompts[-1], reference.outputs[-1]
    await _forget_device(engine)
    intact = await _restored(engine, prompt)
    assert intact.token_ids == expected.token_ids, session
    for pool in pools:
        with zeroed(engine, pool, prompt):
            changed = await _restored(engine, prompt)
        assert _differ(changed, intact), (session, pool)


async def _restored(engine: SglangEngine, prompt: list[int]) -> EngineOutput:
    """A request that loads from the store and leaves nothing."""
    output = await _with_log_probs(engine, prompt)
    assert output.cached_tokens == output.reloaded_tokens >= len(prompt) // 2
    await _forget_device(engine)
    return output


async def _check_that_reads_matter(pair: Pair, reference: Reference) -> None:
    """The control of the transport: where a read moves no byte, the output is another one."""
    with _no_byte_moves(pair):
        played = await remote_round(pair, "unmoved", reference.prompts[0], NEW)
    assert played.decode.cached_tokens
    assert played.tokens != reference.outputs[0].token_ids
    await empty(pair.prefill, pair.decode)


@contextmanager
def _no_byte_moves(pair: Pair) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwitchedTransport, "moves", False)
        # With checksums the read would fail.
        patch.setattr(pair.decode.kv.store, "_has_checksums", False)
        yield


async def _with_log_probs(engine: SglangEngine, prompt: list[int]) -> EngineOutput:
    """A request without a session, which stores nothing. Afterwards the device has nothing of it."""
    output = await run(engine, "", prompt, NEW, **GREEDY, output_options={"logprobs": 0})
    await until(lambda: idle(engine), TIMEOUT_S)
    return output


def _differ(output: EngineOutput, other: EngineOutput) -> bool:
    """Some random weights change the log-probabilities with a pool's KV, but no greedy token."""
    assert output.log_probs
    assert other.log_probs
    pairs = zip(output.log_probs, other.log_probs, strict=True)
    return output.token_ids != other.token_ids or any(abs(mine - theirs) > 0.01 for mine, theirs in pairs)


async def _forget_device(*engines: SglangEngine) -> None:
    """Only the stores know the past from here on."""
    for engine in engines:
        await engine.kv.store.settle(TIMEOUT_S)
        await until(lambda engine=engine: idle(engine), TIMEOUT_S)
