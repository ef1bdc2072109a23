"""The passes of the modelled engine: sizes, order, what the worker is told, and who leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from ampd.policies.base import SlicingSituation
from ampd.serving.pass_sizes import PassSizes
from ampd.types import Parallelism, PrefillTask, RunningRound, Slo
from tests.waiting import until
from tests.workers.engines.modelled_lab import Lab, Predicted, Times, fetch, prompt_of, protects_nothing, run, tokens
from workers.engines.base import EngineOutput, EngineRequest
from workers.engines.modelled import ModelledEngine

PAGE = 16
LONG_STREAM = 4000


@dataclass
class Asked:
    """Slices of one size; notes what it was asked."""

    answer: int = 64
    asked: list[PrefillTask] = field(default_factory=list)
    running: list[tuple[RunningRound, ...]] = field(default_factory=list)

    def slice(self, situation: SlicingSituation) -> int:
        self.asked.append(situation.task)
        self.running.append(tuple(situation.running))
        return self.answer if situation.running else situation.task.incr_tokens


@dataclass
class Sharer:
    """An engine beside whose batch prefills are computed. `told`: ids of the prefills whose last pass has begun."""

    lab: Lab
    engine: ModelledEngine
    policy: Asked
    told: list[str] = field(default_factory=list)

    @property
    def passes(self) -> list[tuple[int, int]]:
        """(KV before, new tokens) of the passes so far; those with a step have the rows of the batch in them."""
        return self.lab.times.prefills

    async def call(
        self, rid: str, prompt: list[int], new: int, *, hist: int = 0, first_s: float | None = None
    ) -> list[EngineOutput]:
        task = PrefillTask(rid, rid, hist, len(prompt) - hist, 0.0, Slo(1.0, 0.1))

        def on_pass(_left_tokens: int, is_last: bool) -> None:
            if is_last:
                self.told.append(rid)

        ends: dict[str, Any] = {"stop_conditions": {"ignore_eos": True}}
        request = EngineRequest(rid, rid, prompt, new, ends, task=task, first_s=first_s, on_pass=on_pass)
        async with aclosing(cast(Any, self.engine.generate(request))) as outputs:
            return [output async for output in outputs]

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[asyncio.Task[Any]]:
        """A request that decodes for the whole block."""
        decoding = asyncio.create_task(self.call("stream", prompt_of(20, seed=9), LONG_STREAM))
        await until(lambda: self.engine.load().running_requests == 1)
        for notes in (self.passes, self.told, self.policy.asked, self.policy.running):
            notes.clear()
        try:
            yield decoding
            assert not decoding.done(), "it ended too soon for the test"
        finally:
            decoding.cancel()
            await asyncio.wait({decoding})


@pytest.fixture
def open_sharer(model_folder: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def opened(policy: Asked | None = None, capacity: int = 100_000, saved: float = 1.0) -> AsyncIterator[Sharer]:
        policy = policy or Asked()
        lab = Lab(model_folder, Times(step_s=0.002, saved=saved))
        async with lab.engine("D", capacity) as engine:
            engine.sizes = PassSizes(policy, Predicted(lab.times), Parallelism(), PAGE)
            yield Sharer(lab, engine, policy)

    return opened


async def test_a_prefill_takes_as_many_passes_as_the_policy_says(open_sharer: Any) -> None:
    async with open_sharer() as sharer:
        alone = tokens(await sharer.call("alone", prompt_of(200), 4))
        assert sharer.passes == [(0, 200)]
        await sharer.engine.kv.serve({"op": "release_session", "session_id": "alone"})
    async with open_sharer() as sharer, sharer.stream():
        assert tokens(await sharer.call("a", prompt_of(200), 4)) == alone
        # One row of the batch is in each pass.
        assert [tokens for _, tokens in sharer.passes] == [65, 65, 65, 9]
        asked = sharer.policy.asked
        assert [(task.hist_tokens, task.incr_tokens) for task in asked] == [(0, 200), (64, 136), (128, 72), (192, 8)]
        assert sharer.told == ["a"]


async def test_where_mixed_passes_save_nothing_the_batch_pauses_for_each(open_sharer: Any) -> None:
    async with open_sharer(saved=0.0) as sharer, sharer.stream():
        steps = len(sharer.lab.times.steps)
        await sharer.call("a", prompt_of(200), 1)
        assert [tokens for _, tokens in sharer.passes] == [64, 64, 64, 8]
        assert len(sharer.lab.times.steps) - steps >= 3, "a step after each of them"
        assert sharer.told == ["a"]


async def test_the_policy_sees_the_rounds_that_decode(open_sharer: Any) -> None:
    async with open_sharer() as sharer, sharer.stream():
        await sharer.call("a", prompt_of(200), 2)
        counts = [round_.tokens for (round_,) in sharer.policy.running]
        assert counts == list(range(counts[0], counts[0] + 4)), "each pass is a step of it"
        assert all(round_.itl_slo_s == 0.1 for (round_,) in sharer.policy.running)
        assert all(round_.context_tokens == 20 + round_.tokens for (round_,) in sharer.policy.running)


async def test_a_round_that_was_prefilled_elsewhere_has_a_token_already(open_sharer: Any) -> None:
    async with open_sharer() as sharer:
        prompt = prompt_of(100)
        await run(sharer.engine, prompt, 0)
        loop = asyncio.get_running_loop()
        over = asyncio.create_task(sharer.call("over", [*prompt, 7], 1000, hist=100, first_s=loop.time() - 5.0))
        await until(lambda: sharer.engine.load().running_requests == 1)
        await sharer.call("a", prompt_of(200, seed=2), 0)
        (first,) = sharer.policy.running[0]
        assert first.tokens == first.context_tokens - 101 + 1
        assert first.elapsed_s > 5.0
        over.cancel()
        await asyncio.wait({over})


async def test_the_batch_decodes_alone_while_the_policy_waits(open_sharer: Any) -> None:
    async with open_sharer(Asked(0)) as sharer, sharer.stream():
        waiting = asyncio.create_task(sharer.call("a", prompt_of(200), 2))
        await until(lambda: len(sharer.policy.asked) > 20)
        assert (sharer.passes, sharer.told) == ([], [])
        sharer.policy.answer = 500
        await waiting
        assert sharer.passes == [(0, 201)]


async def test_a_short_prefill_passes_a_long_one_and_shares_its_pass(open_sharer: Any) -> None:
    async with open_sharer() as sharer, sharer.stream():
        sharer.policy.answer = 0
        long = asyncio.create_task(sharer.call("long", prompt_of(200), 0))
        short = asyncio.create_task(sharer.call("short", prompt_of(30, seed=2), 0))
        asked = len(sharer.policy.asked)
        await until(lambda: len(sharer.policy.asked) > asked and sharer.policy.asked[-1].incr_tokens == 230)
        sharer.policy.answer = 64
        await asyncio.gather(long, short)
        assert sharer.told == ["short", "long"]
        assert [tokens for _, tokens in sharer.passes] == [63, 65, 65, 41]  # the short one counts with two pages


async def test_a_prefill_of_less_than_a_page_takes_a_pass(open_sharer: Any) -> None:
    """Only a round that was prefilled elsewhere joins the batch without one."""
    async with open_sharer() as sharer:
        await run(sharer.engine, prompt_of(96), 0)
        async with sharer.stream():
            await sharer.call("a", prompt_of(105), 2, hist=96)
            # A row of the batch is in it.
            assert [tokens for _, tokens in sharer.passes] == [9 + 1]


async def test_who_leaves_between_two_passes_keeps_what_was_computed(open_sharer: Any) -> None:
    async with open_sharer() as sharer, sharer.stream():
        sharer.lab.times.per_token_s = 0.0005
        leaving = asyncio.create_task(sharer.call("a", prompt_of(640), 2))
        await until(lambda: len(sharer.policy.asked) > 3)
        leaving.cancel()
        await asyncio.wait({leaving})
        kept = sharer.lab.held["D"]["a"]
        assert 128 <= kept < 640
        assert kept % PAGE == 0
        sharer.lab.times.per_token_s = 0.0
        await sharer.call("a", prompt_of(640), 0)
        assert sharer.policy.asked[-1].incr_tokens <= 64
    assert sharer.told == ["a"], "the one that was left was not ending"


async def test_nothing_is_left_behind(open_sharer: Any) -> None:
    async with open_sharer(capacity=5000) as sharer:
        async with sharer.stream():
            await asyncio.gather(*(sharer.call(f"r{number}", prompt_of(300, seed=number), 3) for number in range(8)))
        assert sharer.engine.load().running_requests == 0
        for number in range(8):
            await sharer.engine.kv.serve({"op": "release_session", "session_id": f"r{number}"})
        await sharer.engine.kv.serve({"op": "release_session", "session_id": "stream"})
        assert protects_nothing(sharer.engine)


async def test_kv_that_was_read_joins_the_batch_at_once(open_sharer: Any) -> None:
    async with open_sharer() as sharer, sharer.lab.engine("P") as other:
        prompt = prompt_of(200)
        out = tokens(await run(other, prompt, 1, rid="p"))
        await fetch(sharer.engine, "over", prompt + out, "P")
        async with sharer.stream():
            sharer.policy.answer = 0
            assert len(await sharer.call("over", prompt + out, 3, hist=200, first_s=0.0)) == 3
            assert sharer.passes == []
