"""The modelled engine: tokens, ends, batching, KV memory, cancellation."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from subprocess import run as run_process
from typing import Any, cast
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ampd.keys import page_keys
from tests.waiting import PATIENCE_S
from tests.workers.engines.modelled_lab import Lab, Times, fetch, prompt_of, protects_nothing, run, tokens
from workers.engines.base import EngineError, EngineLostError, EngineRequest
from workers.engines.modelled import ModelledEngine
from workers.kv.modelled import ModelledDevice

PAGE = 16


@pytest.fixture
def lab(model_folder: Path) -> Lab:
    return Lab(model_folder, Times())


@pytest.fixture
async def engine(lab: Lab) -> AsyncIterator[ModelledEngine]:
    async with lab.engine("D") as modelled:
        yield modelled


# -- tokens


async def test_every_route_gives_the_same_tokens(lab: Lab) -> None:
    """Six rounds: local, remote and alternating, on pairs that share nothing."""

    async def session(routes: list[str]) -> list[list[int]]:
        lab.peers.engines.clear()
        context, rounds = prompt_of(300), []
        async with lab.engine("P") as prefill, lab.engine("D") as decode:
            for number, route in enumerate(routes):
                if route == "local":
                    out = tokens(await run(decode, context, 10))
                else:
                    await fetch(prefill, f"p{number}", context, "D")
                    out = tokens(await run(prefill, context, 1, rid=f"p{number}"))
                    await fetch(decode, f"d{number}", context + out, "P")
                    out += tokens(await run(decode, context + out, 9, rid=f"d{number}"))
                rounds.append(out)
                context = context + out + prompt_of(50, seed=number)
        return rounds

    local = await session(["local"] * 6)
    assert local == await session(["remote"] * 6)
    assert local == await session(["local", "remote"] * 3)
    assert len({tuple(out) for out in local}) == 6
    assert all(len(out) == 10 for out in local)


async def test_tokens_depend_on_the_whole_context(engine: ModelledEngine) -> None:
    prompt = prompt_of(200)
    changed = [prompt[0] + 1, *prompt[1:]]
    assert tokens(await run(engine, prompt, 8)) != tokens(await run(engine, changed, 8))


async def test_tokens_are_plain_text(engine: ModelledEngine, model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    text = tokenizer.decode(tokens(await run(engine, prompt_of(40), 64)), skip_special_tokens=False)
    assert text.isascii()
    assert text.replace(" ", "").isalpha()


async def test_choices_differ_and_the_first_is_that_of_a_single_one(engine: ModelledEngine) -> None:
    outputs = await run(engine, prompt_of(40), 6, sampling_options={"n": 3})
    outs = [tokens(outputs, index) for index in range(3)]
    assert outs[0] == tokens(await run(engine, prompt_of(40), 6))
    assert len({tuple(out) for out in outs}) == 3
    assert [sum(o.finish_reason is not None for o in outputs if o.index == index) for index in range(3)] == [1, 1, 1]


async def test_log_probs_on_request(engine: ModelledEngine) -> None:
    first = await run(engine, prompt_of(40), 5, output_options={"logprobs": 3})
    again = await run(engine, prompt_of(40), 5, output_options={"logprobs": 3})
    assert [(o.log_probs, o.top_logprobs) for o in first] == [(o.log_probs, o.top_logprobs) for o in again]
    for output in first:
        assert output.log_probs is not None
        assert output.top_logprobs is not None
        (top,) = output.top_logprobs
        assert [entry["rank"] for entry in top] == [1, 2, 3]
        assert top[0]["token_id"] == output.token_ids[0]
        assert top[0]["logprob"] == output.log_probs[0] < 0
        assert top[0]["logprob"] > top[1]["logprob"] > top[2]["logprob"]
    assert (await run(engine, prompt_of(40), 1))[0].log_probs is None
    assert (await run(engine, prompt_of(40), 1, output_options={"logprobs": 0}))[0].top_logprobs is None


# -- ends


async def test_ends(engine: ModelledEngine) -> None:
    prompt = prompt_of(40)
    free = tokens(await run(engine, prompt, 10))
    stop = free[4]
    at = free.index(stop) + 1

    outputs = await run(engine, prompt, 10)
    assert (outputs[-1].finish_reason, outputs[-1].completion_tokens, outputs[-1].prompt_tokens) == ("length", 10, 40)

    outputs = await run(engine, prompt, 10, stop_conditions={"stop_token_ids": [stop]})
    assert (tokens(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason) == (free[:at], "stop", stop)

    outputs = await run(engine, prompt, 10, stop_conditions={"stop_token_ids_hidden": [stop]})
    assert (tokens(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason) == (free[:at], "stop", None)

    outputs = await run(engine, prompt, 10, eos_token_ids=[stop])
    assert (tokens(outputs), outputs[-1].finish_reason) == (free[:at], "stop")

    outputs = await run(engine, prompt, 10, eos_token_ids=[stop], stop_conditions={"ignore_eos": True})
    assert tokens(outputs) == free

    outputs = await run(engine, prompt, 10, eos_token_ids=[stop], stop_conditions={"min_tokens": at + 1})
    assert len(tokens(outputs)) > at


async def test_the_context_is_the_last_limit(engine: ModelledEngine) -> None:
    limit = engine.info.max_context_tokens
    for wanted in (None, 3, 4, 10 * limit):
        outputs = await run(engine, prompt_of(limit - 3), wanted)
        assert (len(tokens(outputs)), outputs[-1].finish_reason) == (3, "length")


async def test_rounds_end_by_themselves_when_asked(lab: Lab) -> None:
    async with lab.engine("E", eos_every=5) as engine:
        lengths = [len(tokens(await run(engine, prompt_of(40, seed), 200, eos_token_ids=[2]))) for seed in range(60)]
        assert 3 < sum(lengths) / len(lengths) < 8
        out = tokens(await run(engine, prompt_of(40), 30, eos_token_ids=[2], stop_conditions={"ignore_eos": True}))
        assert len(out) == 30
        assert 2 not in out


@pytest.mark.parametrize(
    ("length", "request_", "words"),
    [
        (0, {}, "empty"),
        (4096, {}, "context takes 4096"),
    ],
)
async def test_refusals(engine: ModelledEngine, length: int, request_: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words) as caught:
        await run(engine, prompt_of(length), 5, **request_)
    assert caught.value.status == 400
    assert engine.load().running_requests == 0


# -- time and batching


async def test_a_prefill_pauses_the_batch_and_costs_what_the_model_says(lab: Lab, engine: ModelledEngine) -> None:
    lab.times.step_s, lab.times.per_token_s = 0.001, 0.0001
    long = asyncio.create_task(run(engine, prompt_of(100), 200, session="a"))
    while len(lab.times.steps) < 5:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    before = len(lab.times.steps)
    second = await run(engine, prompt_of(200, seed=2), 3, session="b")
    assert lab.times.prefills == [(0, 100), (0, 200)]
    assert 2 in {batch for batch, _ in lab.times.steps[before:]}
    assert len(tokens(second)) == 3
    assert len(tokens(await long)) == 200
    assert lab.times.steps[0] == (1, 101)


async def test_the_batch_grows_to_all_who_decode(lab: Lab, engine: ModelledEngine) -> None:
    lab.times.step_s = 0.001
    await asyncio.gather(*(run(engine, prompt_of(64, seed), 30, session=f"s{seed}") for seed in range(8)))
    assert max(batch for batch, _ in lab.times.steps) == 8
    assert len(lab.times.steps) < 8 * 29, "steps are shared"


async def test_outputs_come_one_step_at_a_time(lab: Lab, engine: ModelledEngine) -> None:
    lab.times.step_s = 0.001
    outputs = await run(engine, prompt_of(64), 20)
    assert [len(output.token_ids) for output in outputs] == [1] * 20


async def test_late_wake_ups_do_not_add_up(lab: Lab, engine: ModelledEngine) -> None:
    """300 steps of 0.2 ms, far below what a timer resolves."""
    lab.times.step_s = 0.0002
    start_s = asyncio.get_running_loop().time()
    await run(engine, prompt_of(64), 300)
    assert asyncio.get_running_loop().time() - start_s >= 299 * 0.0002 - 0.01


# -- KV memory


async def test_a_second_round_finds_its_context(lab: Lab, engine: ModelledEngine) -> None:
    prompt = prompt_of(160)
    out = tokens(await run(engine, prompt, 20))
    assert lab.held["D"]["s"] == (160 + 19) // PAGE * PAGE
    last = (await run(engine, prompt + out + prompt_of(40, seed=9), 5))[-1]
    assert last.cached_tokens == (160 + 19) // PAGE * PAGE
    assert lab.times.prefills == [(0, 160), (176, 44)]


async def test_the_increment_alone_is_read_back(lab: Lab) -> None:
    async with lab.engine("P") as prefill, lab.engine("D") as decode:
        history = prompt_of(320)
        history += tokens(await run(decode, history, 16))
        context = history + prompt_of(64, seed=3)
        read = await fetch(prefill, "p", context, "D")
        assert (read.tokens, read.error) == (320, None)
        assert read.bytes == 320 * prefill.info.kv_bytes_per_token
        (first,) = await run(prefill, context, 1, rid="p")
        assert first.cached_tokens == 320
        back = await fetch(decode, "d", context + first.token_ids, "P")
        assert back.tokens == 400 - 320
        outputs = await run(decode, context + first.token_ids, 5, rid="d", first_s=0.0)
        assert outputs[-1].cached_tokens == 400
        # The tail of one token was computed within a decode step, not as a prefill of its own.
        assert lab.times.prefills == [(0, 320), (320, 80)]
        assert protects_nothing(decode)
        assert protects_nothing(prefill)
        await asyncio.sleep(0)
        assert lab.peers.calls.count(("D", "lease")) == lab.peers.calls.count(("D", "unlease")) == 1


async def test_a_read_that_fails_means_recompute(lab: Lab) -> None:
    lab.times.transfer_s = 5.0
    async with lab.engine("P") as prefill, lab.engine("D") as decode:
        prompt = prompt_of(160)
        await run(decode, prompt, 4)
        gone = await fetch(prefill, "p1", prompt, "nobody")
        assert (gone.tokens, gone.error) == (0, "ConnectionError: worker nobody cannot be reached")
        slow = await fetch(prefill, "p2", prompt, "D", timeout_s=0.02)
        assert slow.tokens == 0
        assert slow.error == "no KV from D within 0.02 s"
        assert (await run(prefill, prompt, 1, rid="p2"))[-1].cached_tokens == 0


async def test_released_sessions_are_gone(lab: Lab, engine: ModelledEngine) -> None:
    await run(engine, prompt_of(160), 4)
    reply = await engine.kv.serve({"op": "release_session", "session_id": "s"})
    assert reply == {"released_tokens": 160}
    assert lab.held["D"]["s"] == 0
    assert engine.kv.session_tokens == engine.load().kv_used_tokens == 0
    assert protects_nothing(engine)
    assert engine.kv.store.directory.match(page_keys(prompt_of(160), PAGE, tenant="")) == 0


async def test_least_recently_used_sessions_make_room(lab: Lab) -> None:
    async with lab.engine("S", store=1000) as engine:
        for name in "abcd":
            await run(engine, prompt_of(320, seed=ord(name)), 4, session=name)
            assert engine.kv.figures.used_tokens <= 1000
        assert lab.held["S"]["a"] < 320, "its end went first"
        assert lab.held["S"]["d"] == 320
        assert engine.kv.figures.evicted_tokens == {"idle": 4 * 320 - engine.kv.figures.used_tokens}


@pytest.mark.slow
@pytest.mark.parametrize("slices", [1, 2])
async def test_what_the_next_round_can_compute_in_time_makes_room_first(lab: Lab, slices: int) -> None:
    lab.times.per_token_s = 1e-3
    async with lab.engine("S", store=1000) as engine:
        for name, target_s in (("tight", 0.1), ("loose", 1.2)):
            prompt = prompt_of(320, seed=ord(name[0]))
            for number in range(1, slices + 1):
                part, output_tokens = prompt[: 320 * number // slices], int(number == slices)
                call = EngineRequest(uuid4().hex, name, part, output_tokens, ttft_slo_s=target_s)
                async with aclosing(cast(Any, engine.generate(call))) as outputs:
                    assert [output async for output in outputs]
        await run(engine, prompt_of(480, seed=3), 1, session="new")
        # The tight session was idle for longer, and misses its target in any case.
        assert lab.held["S"] == {"tight": 320, "loose": 320 - 8 * 16, "new": 480}
        assert engine.kv.figures.evicted_tokens == {"surplus": 8 * 16}


async def test_a_session_that_left_the_device_is_reloaded(lab: Lab) -> None:
    lab.times.per_token_s, lab.times.reload_token_s = 1e-4, 1e-5
    async with lab.engine("S", capacity=500) as engine:
        context = prompt_of(320)
        first = await run(engine, context, 4)
        await run(engine, prompt_of(400, seed=2), 4, session="other")
        assert engine.load().kv_used_tokens == 0, "nothing runs"
        context += tokens(first) + prompt_of(60, seed=3)
        again = (await run(engine, context, 4))[-1]
        # 31 pages fit: the 25 of the other session, and the first six of this one.
        assert (again.cached_tokens, again.reloaded_tokens) == (320, 320 - 6 * PAGE)
        assert again.reload_s == pytest.approx((320 - 6 * PAGE) * 1e-5)
        assert lab.times.prefills[-1] == (320, 64)
        # What ran last is still on the device.
        third = (await run(engine, context, 4))[-1]
        assert (third.cached_tokens, third.reloaded_tokens, third.reload_s) == (368, 0, 0.0)


async def test_a_session_whose_reload_takes_longer_than_its_computation_is_computed_again(lab: Lab) -> None:
    lab.times.per_token_s, lab.times.reload_token_s = 1e-5, 1e-4
    async with lab.engine("S", capacity=500) as engine:
        await run(engine, prompt_of(320), 4)
        await run(engine, prompt_of(400, seed=2), 4, session="other")
        again = (await run(engine, prompt_of(384), 4))[-1]
        assert (again.cached_tokens, again.reloaded_tokens, again.reload_s) == (6 * PAGE, 0, 0.0)
        assert lab.times.prefills[-1] == (6 * PAGE, 384 - 6 * PAGE)


async def test_a_session_that_left_device_and_store_is_computed_again(lab: Lab) -> None:
    async with lab.engine("S", capacity=500, store=500) as engine:
        await run(engine, prompt_of(320), 4)
        await run(engine, prompt_of(400, seed=2), 4, session="other")
        again = (await run(engine, prompt_of(320), 4))[-1]
        assert (again.cached_tokens, again.reloaded_tokens) == (6 * PAGE, 0), "the end went first"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(0, 2)), max_size=12))
def test_the_device_never_keeps_more_than_it_has(rounds: list[tuple[int, int, int]]) -> None:
    """Requests that overlap and share prefixes: what they use is counted once, and the cache gives way."""
    device, running = ModelledDevice(20 * PAGE, PAGE), list[list[bytes]]()
    for family, pages, leaving in rounds:
        keys = [b"%d.%d" % (family, number) for number in range(pages)]
        there = device.match(keys)
        if device.admit(keys[:there], (pages - there) * PAGE, anyway=False):
            device.use(keys[there:])
            running.append(keys)
            assert device.match(keys) == pages
        assert device.used_tokens == PAGE * len({key for keys in running for key in keys}) <= 20 * PAGE
        for keys in running[:leaving]:
            device.leave(keys)
        del running[:leaving]
        assert len(device._users) + len(device._cached) <= 20
    for keys in running:
        device.leave(keys)
    assert device.used_tokens == 0


async def test_requests_wait_for_kv_memory_and_all_run(lab: Lab) -> None:
    lab.times.step_s = 0.0005
    async with lab.engine("S", capacity=1000) as engine:
        runs = [run(engine, prompt_of(320, seed), 60, session=f"s{seed}") for seed in range(6)]
        async with asyncio.timeout(PATIENCE_S):
            outputs = await asyncio.gather(*runs)
        assert all(len(tokens(output)) == 60 for output in outputs)
        assert max(batch for batch, _ in lab.times.steps) == 2
        assert engine.load().kv_used_tokens <= 1000


async def test_a_prompt_beyond_the_kv_memory_is_refused(lab: Lab) -> None:
    async with lab.engine("S", capacity=100) as engine:
        with pytest.raises(EngineError, match="KV memory holds 100"):
            await run(engine, prompt_of(200), 5)


# -- going away


@pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding"])
async def test_closing_the_iterator_ends_the_work(lab: Lab, engine: ModelledEngine, stage: str) -> None:
    lab.times.per_token_s = 100.0 if stage != "decoding" else 0.0
    lab.times.step_s = 0.001
    blocker = asyncio.create_task(run(engine, prompt_of(100, seed=5), 1, session="b")) if stage == "waiting" else None
    await asyncio.sleep(0.01)
    seen = asyncio.Event()

    async def consume() -> None:
        stream = cast(Any, engine.generate(EngineRequest("r" * 32, "s", prompt_of(100), 4000)))
        async with aclosing(stream) as outputs:
            async for _ in outputs:
                seen.set()

    task = asyncio.create_task(consume())
    if stage == "decoding":
        await seen.wait()
        assert engine.load().running_requests == 1
    else:
        await asyncio.sleep(0.02)
        assert not seen.is_set()
    task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE_S)
    steps = len(lab.times.steps)
    await asyncio.sleep(0.02)
    assert engine.load().running_requests == 0
    assert len(lab.times.steps) <= steps + 1
    lab.times.per_token_s = 0.0
    if blocker:
        blocker.cancel()
        await asyncio.wait({blocker})
    async with asyncio.timeout(PATIENCE_S):
        assert len(tokens(await run(engine, prompt_of(50, seed=7), 3, session="next"))) == 3
    assert protects_nothing(engine), "no session counts as running any more"


async def test_a_failing_time_line_ends_everybody_and_says_so(lab: Lab, engine: ModelledEngine) -> None:
    lost = asyncio.create_task(engine.wait_lost())

    def fail(*_: object) -> float:
        raise ZeroDivisionError("the model broke")

    lab.times.prefill_s = fail
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EngineLostError):
            await run(engine, prompt_of(100), 5)
        assert "the model broke" in await lost
        with pytest.raises(EngineLostError):
            await run(engine, prompt_of(100), 5)


@pytest.mark.slow
async def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys, workers.__main__, workers.component, workers.engines.modelled;"
        "print(sorted({'torch', 'sglang', 'nixl', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = run_process([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # noqa: ASYNC221
    assert done.stdout.strip() == "[]"
