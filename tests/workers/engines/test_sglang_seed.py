"""Seeds on SGLang: a token depends on the seed and its position only, so a split round gives the same tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from ampd.tiny_model import make_tiny_model

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.engine_hooks import in_engine_processes
from tests.harness.sglang_pair import LocalPeers, Pair, SwitchedTransport, empty, pair_settings, read, rid, run, text
from workers.engines.base import EngineError, EngineOutput
from workers.engines.sglang import SglangEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="module"),
]

TOKENS = 24
PROMPT = text(5, 90)


def allow_seeds_on_the_cpu() -> None:
    """SGLang allows seeds with kernels of GPUs only. What it gives to them, and does with their result, is its own."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers import sampler

    patched: Any = batch_invariant_ops, sampler
    patched[0].enable_batch_invariant_mode = lambda: None
    patched[1].murmur_hash32 = hash_of
    torch.compiler.set_stance("force_eager")
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def hash_of(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """32 bits of a seed, a position and a column, as SGLang's kernel gives them, but by another function."""
    rows = seeds.to(torch.int64) * 7919 + positions.to(torch.int64) * 104729
    value = (rows[:, None] + columns[None, :].to(torch.int64) * 1299709) & 0xFFFFFFFF
    for _ in range(3):
        value = ((value ^ (value >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return value


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeded(tmp_path_factory: pytest.TempPathFactory, forked: None) -> AsyncIterator[Pair]:  # noqa: ARG001
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    arguments = json.dumps({"enable_deterministic_inference": True, "mem_fraction_static": 0.6})
    settings = pair_settings(model).model_copy(update={"engine_args": arguments})
    pair = Pair(SglangEngine(settings, SwitchedTransport), SglangEngine(settings, SwitchedTransport), LocalPeers())
    allow_seeds_on_the_cpu()
    try:
        with in_engine_processes(allow_seeds_on_the_cpu):
            await pair.prefill.start()
            await pair.decode.start()
        pair.connect()
        yield pair
    finally:
        await pair.prefill.stop()
        await pair.decode.stop()


def sampled(seed: int, **options: Any) -> dict[str, Any]:
    options = {"seed": seed, "temperature": 1.0, **options}
    return {"sampling_options": options, "stop_conditions": {"ignore_eos": True}}


async def whole(pair: Pair, seed: int, **options: Any) -> list[int]:
    """The round on one engine that has nothing of it."""
    await empty(pair.prefill, pair.decode)
    return (await run(pair.decode, "whole", PROMPT, TOKENS, **sampled(seed, **options))).token_ids


async def split(pair: Pair, seed: int, **options: Any) -> tuple[list[int], EngineOutput]:
    """The round with its first token from the other engine, and the output of the engine that went on."""
    await empty(pair.prefill, pair.decode)
    request, second_rid = sampled(seed, **options), rid()
    first = await run(pair.prefill, "split", PROMPT, 1, **request)
    handed = [*PROMPT, *first.token_ids]
    await read(pair.decode, second_rid, handed, "P", 120.0)
    rest = await run(pair.decode, "split", handed, TOKENS - 1, second_rid, **request)
    return [*first.token_ids, *rest.token_ids], rest


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "top_k": 50}], ids=["all tokens", "the best tokens"])
async def test_a_split_round_with_a_seed_gives_the_tokens_of_a_whole_one(seeded: Pair, options: dict[str, Any]) -> None:
    outputs = []
    for seed in (7, 8):
        tokens, rest = await split(seeded, seed, **options)
        assert tokens == await whole(seeded, seed, **options) == await whole(seeded, seed, **options)
        assert rest.cached_tokens >= len(PROMPT) // 16 * 16
        outputs.append(tokens)
    assert outputs[0] != outputs[1]
    assert outputs[0][1:] != outputs[1][1:]


async def test_min_p_does_not_end_an_engine_that_samples_by_seeds(seeded: Pair) -> None:
    """An assertion in SGLang's scheduler would fail."""
    with pytest.raises(EngineError, match="min_p") as refused:
        await run(seeded.decode, "", PROMPT, 4, **sampled(7, min_p=0.1))
    assert refused.value.status == 400
    best = await run(seeded.decode, "", PROMPT, 4, **sampled(7, min_p=0.1, temperature=0.0))
    assert len(best.token_ids) == 4
