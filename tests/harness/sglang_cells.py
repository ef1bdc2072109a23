"""The cells of a matrix: pairs of a prefill and a decode engine of several degrees, each pair on every route.

Engines take seconds to start, so the pairs share them. A pair's routes, its delays and its controls share the sessions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cpu_families import ENGINE_ARGUMENTS, cpu_family
from tests.harness.engine_hooks import LateRank, delay_loads, in_engine_processes
from tests.harness.sglang_pair import (
    GREEDY,
    PAGE,
    TIMEOUT_S,
    LocalPeers,
    Pair,
    RelayedPair,
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
from tests.harness.tiny_families import make_family
from tests.waiting import until
from workers.engines.base import EngineOutput
from workers.engines.sglang import SglangEngine, SglangSettings

INCREMENTS = (203, 70, 33, 100, 17, 60)
NEW = 8
ROUTES = {"remote": (True,), "local": (False,), "alternating": (True, False)}
LONGEST_DELAY_S = 0.05
LONGEST_LOAD_DELAY_S = 0.1
STATE_TOKENS = 64
"""SGLang keeps the state of a gated delta net at multiples of this in prefills."""

DECODED_STATE_TOKENS = 256
"""And at multiples of this while it decodes."""


@dataclass(frozen=True)
class Model:
    """A model, and how the engines of a matrix run it.

    Attributes:
        make: writes the model into a folder, and returns the folder.
        pools: the KV pools that SGLang has for it.
        family: see `tests.harness.cpu_families`.
        increments: of the rounds of a session, in tokens.
    """

    make: Callable[[Path], Path]
    pools: tuple[str, ...] = ("kv",)
    page_size: int = PAGE
    family: str = "qwen3"
    dtype: str = "float32"
    arguments: dict[str, Any] = field(default_factory=dict)
    increments: Sequence[int] = INCREMENTS

    @property
    def grain_tokens(self) -> int:
        """Of how many tokens of a prefill the KV is kept, or computed again."""
        return STATE_TOKENS if "mamba" in self.pools else self.page_size

    def slack_tokens(self, prompt_tokens: int) -> int:
        """The most tokens that may be computed again after a round with this prompt."""
        if "mamba" not in self.pools:
            return self.page_size
        computed = prompt_tokens + NEW - 1  # the last token is not, before the next round
        decoded = computed - computed % DECODED_STATE_TOKENS
        kept = decoded if decoded > prompt_tokens else prompt_tokens - prompt_tokens % STATE_TOKENS
        return prompt_tokens + NEW - kept

    def settings(self, folder: Path, tp: int) -> SglangSettings:
        """What an engine of this degree runs."""
        arguments = ENGINE_ARGUMENTS.get(self.family, {}) | self.arguments
        more = {"page_size": self.page_size, "dtype": self.dtype, "engine_args": json.dumps(arguments)}
        return pair_settings(folder, tp).model_copy(update={**more, "allow_untested": True})

    @contextmanager
    def late_engines(self, folder: Path) -> Iterator[LateRank]:
        """Engines that start meanwhile can compute it. A rank of each is late, and all loads begin late.

        A race does not appear by itself.
        """
        late = LateRank(folder, LONGEST_DELAY_S)
        with cpu_family(self.family), late.in_engines(), in_engine_processes(delay_loads, LONGEST_LOAD_DELAY_S):
            yield late


_OPTIONS: dict[str, dict[str, Any]] = {
    # Some of MLA's attention backends on GPUs run no other pages.
    "deepseek_v3": {"page_size": 64},
    "gpt_oss": {"pools": ("kv", "swa")},
    "gemma_4": {"pools": ("kv", "swa")},
    # The first output crosses a multiple of 256 tokens, where decoding keeps a state.
    "qwen3_next": {"pools": ("kv", "mamba"), "increments": (DECODED_STATE_TOKENS - 5, *INCREMENTS[1:])},
}
"""How families differ from a plain model."""


def family_model(family: str, kv_heads: int = 2, heads: int = 4, **options: Any) -> Model:
    """The tiny model of a family of `tests.harness.tiny_families`."""
    make = partial(make_family, family=family, kv_heads=kv_heads, heads=heads)
    return Model(make, family=family, **_OPTIONS.get(family, {}) | options)


@dataclass(frozen=True)
class Reference:
    """The rounds of a session as one engine computes them, each prompt whole."""

    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[EngineOutput] = field(default_factory=list)


@dataclass(frozen=True)
class Cells:
    """Checks pairs of engines.

    Attributes:
        late: chooses the rank of each engine that is late.
    """

    model: Model
    reference: Reference
    late: LateRank

    async def check_route(self, pair: Pair, name: str, late_rank: int | None = None) -> None:
        """Rounds give the tokens of the reference, and compute no more of what was computed before than the slack.

        Args:
            pair: its stores are emptied first.
            name: among `ROUTES`. On alternating routes the devices keep what they have, as they do in use. On the
                others they forget each round, so that all history comes from the stores.
            late_rank: by default another one in each round.
        """
        ranks = [engine.info.parallelism.tp for engine in (pair.prefill, pair.decode)]
        session, routes, kept_tokens = f"{ranks[0]} x {ranks[1]} {name}", ROUTES[name], 0
        await empty(*pair.engines)
        for number, prompt in enumerate(self.reference.prompts):
            self.late.choose((number + 1) % max(ranks) if late_rank is None else late_rank)
            is_remote = routes[number % len(routes)]
            played = await (remote_round if is_remote else local_round)(pair, session, prompt, NEW)
            first = played.prefill or played.decode
            assert played.tokens == self.reference.outputs[number].token_ids, (session, number)
            assert first.cached_tokens >= kept_tokens, (session, number)
            if is_remote:
                computed_tokens = played.decode.prompt_tokens - played.decode.cached_tokens
                assert computed_tokens <= self.model.grain_tokens + 1, (session, number, played.to_decode)
            kept_tokens = len(prompt) + NEW - self.model.slack_tokens(len(prompt))
            if name != "alternating":
                await _forget_device(pair.prefill, pair.decode)

    async def check_that_pools_matter(self, *engines: SglangEngine) -> None:
        """The control on some sides of a pair, after an alternating route."""
        prompt, expected = self.reference.prompts[-1], self.reference.outputs[-1].token_ids
        for engine in engines:
            await check_that_pools_matter(engine, prompt, expected, self.model.pools)


async def check_cells(model: Model, folder: Path, pairs: Sequence[tuple[int, int]]) -> None:
    """Let engines of these degrees (prefill, decode) exchange the KV of sessions."""
    made = model.make(folder / "model")
    async with AsyncExitStack() as stack:
        late = stack.enter_context(model.late_engines(folder))
        engines = {
            at: await started(stack, model.settings(made, at[0]))
            for at in sorted({at for pair in pairs for at in _engines_of(pair)})
        }
        chosen = {pair: [engines[at] for at in _engines_of(pair)] for pair in pairs}
        first = chosen[pairs[0]][0]
        assert tuple(pool.name for pool in first.kv.store.geometry.pools) == model.pools
        cells = Cells(model, await alone(first, increments=model.increments), late)
        for decode in {decode for _, decode in chosen.values()} - {first}:
            await _check_that_reads_matter(connected(first, decode), cells.reference)
        for degrees, (prefill, decode) in chosen.items():
            pair = connected(prefill, decode, first)
            if max(degrees) > _LARGEST_TWICE:
                await cells.check_route(pair, "alternating")
                await cells.check_that_pools_matter(decode)
                continue
            for name in ROUTES:
                if name == "local" and degrees[0] != pairs[0][0]:
                    continue  # the prefill worker has no part in it
                await cells.check_route(pair, name)
            await cells.check_that_pools_matter(prefill, decode)


_LARGEST_TWICE = 2
"""More ranks than cores are slow: there, one engine plays both sides of 4 x 4, and one route and control must do."""


def _engines_of(pair: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The engines of a pair of degrees, as (degree, number): there are two of a degree only for pairs of equal ones."""
    prefill, decode = pair
    return (prefill, 1), (decode, 2 if prefill == decode <= _LARGEST_TWICE else 1)


async def started(stack: AsyncExitStack, settings: SglangSettings) -> SglangEngine:
    """An engine that stops with the stack."""
    engine = SglangEngine(settings, SwitchedTransport)
    stack.push_async_callback(engine.stop)
    await engine.start()
    return engine


def connected(prefill: SglangEngine, decode: SglangEngine, relay: SglangEngine | None = None) -> Pair:
    """A prefill and a decode worker that know each other. If they are one, the relay has the KV between its turns."""
    peers = LocalPeers()
    if relay is not None and prefill is decode:
        pair: Pair = RelayedPair(prefill, decode, peers, relay=relay)
    else:
        pair = Pair(prefill, decode, peers)
    pair.connect()
    return pair


async def alone(engine: SglangEngine, seed: int = 0, increments: Sequence[int] = INCREMENTS) -> Reference:
    """The session's rounds on one engine, without a store. Another seed gives another text."""
    reference = Reference()
    context: list[int] = []
    for number, increment in enumerate(increments):
        prompt = context + text(seed * 100 + number, increment)
        output = await with_log_probs(engine, prompt)
        assert not output.cached_tokens
        reference.prompts.append(prompt)
        reference.outputs.append(output)
        context = prompt + output.token_ids
    return reference


async def check_that_pools_matter(
    engine: SglangEngine, prompt: list[int], expected: list[int], pools: Sequence[str]
) -> None:
    """The control: with the records of a pool zeroed, a context from the store gives another output."""
    await _forget_device(engine)
    intact = await _restored(engine, prompt)
    assert intact.token_ids[: len(expected)] == expected
    for pool in pools:
        with zeroed(engine, pool, prompt):
            changed = await _restored(engine, prompt)
        assert _differ(changed, intact), pool


async def _restored(engine: SglangEngine, prompt: list[int]) -> EngineOutput:
    """A request that loads from the store and leaves nothing."""
    output = await with_log_probs(engine, prompt)
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


async def with_log_probs(engine: SglangEngine, prompt: list[int]) -> EngineOutput:
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
