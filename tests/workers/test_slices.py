"""Local prefills in slices, on the modelled engine: what the policy is asked, what is computed, what is left behind."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ampd.policies.base import Compute, OrderingSituation, Pick, Run, Slice, SlicingSituation, Wait
from ampd.policies.registry import create
from ampd.policies.slicing.slack import SlackSlicing
from ampd.serving.pass_sizes import PassSizes
from ampd.types import Parallelism
from tests.virtual_time import run_virtually
from tests.waiting import until
from tests.workers.engines.modelled_lab import Lab, Predicted, Times, prompt_of, protects_nothing, run, tokens
from tests.workers.parts_lab import worker_parts
from tests.workers.slices_lab import ENOUGH, Recorded, Switched, message, out, script
from workers.engines.base import EngineError
from workers.prefill_queue import AsyncPrefillQueue
from workers.round_service import RoundService


@dataclass
class Station:
    """One decode worker without Dynamo. `predicted`: the model that its decisions ask."""

    lab: Lab
    engine: Recorded
    queue: AsyncPrefillQueue
    rounds: RoundService
    slicing: Switched
    ordering: Switched
    predicted: Times

    @property
    def times(self) -> Times:
        return self.lab.times

    async def round(self, prompt: list[int], new: int, *, session: str = "s", **options: Any) -> list[dict[str, Any]]:
        async with aclosing(self.rounds.generate(message(prompt, new, session, **options))) as chunks:
            return [chunk async for chunk in chunks]


@pytest.fixture
def open_station(model_folder: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def opened(policy: Any, ordering: str = "fcfs", *, follows_times: bool = True) -> AsyncIterator[Station]:
        lab = Lab(model_folder, Times())
        async with lab.engine("D") as modelled:
            engine = Recorded(modelled)
            slicing, switched = Switched(policy), Switched(create("ordering", ordering))
            clock = asyncio.get_running_loop().time
            predicted = Predicted(lab.times if follows_times else Times())
            parts = worker_parts("D", engine, predicted, slicing=slicing, ordering_policy=switched, clock=clock)
            yield Station(lab, engine, parts.queue, parts.rounds, slicing, switched, predicted)

    return opened


# -- whole


async def test_whole_is_one_call(open_station: Any) -> None:
    async with open_station(create("slicing", "whole")) as station:
        chunks = await station.round(prompt_of(700), 4)
        assert station.engine.calls == [(700, 4, 0)]
        assert "slices" not in chunks[-1]["ampd"]


# -- slices


async def test_slices_are_whole_pages_and_nothing_is_computed_twice(open_station: Any) -> None:
    async with open_station(create("slicing", "whole")) as station:
        expected = out(await station.round(prompt_of(700), 6))
    policy = script(Compute(250), Compute(250), Compute(250))
    async with open_station(policy) as station:
        chunks = await station.round(prompt_of(700), 6)
        assert station.engine.calls == [(240, 0, 0), (480, 0, 240), (700, 6, 480)]
        assert station.times.prefills == [(0, 240), (240, 240), (480, 220)]
        assert out(chunks) == expected
        # The first answer was for the numbers of the coordinator, the second for what is really held.
        assert policy.asked == [(0, 700), (0, 700), (240, 460), (480, 220)]
        report = chunks[-1]["ampd"]
        assert (report["slices"], report["cached_tokens"], report["held_tokens"]) == (3, 0, 704)
        usage = chunks[-1]["completion_usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (700, {"cached_tokens": 0})
        assert station.lab.held["D"]["s"] == 704


async def test_a_slice_is_a_page_at_least_and_costs_its_time(open_station: Any) -> None:
    async with open_station(script(Compute(1), Compute(1), Compute(1))) as station:
        await station.round(prompt_of(100), 2)
        assert station.times.prefills == [(0, 16), (16, 16), (32, 68)]


async def test_slices_begin_behind_what_is_really_held(open_station: Any) -> None:
    """The coordinator may know of less (another replica served the session), or of more (it was released)."""
    for claimed in (0, 320, 400):
        policy = script()
        async with open_station(policy) as station:
            prompt = prompt_of(320)
            await station.round(prompt, 1)
            policy.asked.clear()
            policy.answers = iter([Compute(64), Compute(64)])
            chunks = await station.round(prompt + prompt_of(180, seed=2), 2, hist=claimed)
            assert policy.asked[1:] == [(320, 180), (384, 116)]
            assert station.times.prefills == [(0, 320), (320, 64), (384, 116)]
            assert chunks[-1]["ampd"]["cached_tokens"] == 320


async def test_a_slice_that_leaves_less_than_nothing_is_the_rest(open_station: Any) -> None:
    async with open_station(script(Compute(690), Compute(690))) as station:
        await station.round(prompt_of(690 + 6), 2)
        assert [call[:2] for call in station.engine.calls] == [(688, 0), (696, 2)]
    async with open_station(script(Compute(95), Compute(95))) as station:
        await station.round(prompt_of(96), 2)
        assert [call[:2] for call in station.engine.calls] == [(80, 0), (96, 2)]


async def test_several_choices_share_the_slices(open_station: Any) -> None:
    async with open_station(script(Compute(128), Compute(128))) as station:
        chunks = await station.round(prompt_of(300), 5, sampling_options={"n": 2})
        assert station.times.prefills == [(0, 128), (128, 172)]
        assert [len(out(chunks, index)) for index in (0, 1)] == [5, 5]


async def test_what_the_cache_cannot_help_runs_whole(open_station: Any) -> None:
    async with open_station(script(Compute(128), Compute(128))) as station:
        await station.round(prompt_of(300), 2, output_options={"prompt_logprobs": 1})
        assert [call[:2] for call in station.engine.calls] == [(300, 2)]


async def test_what_the_engine_refuses_is_refused_at_once(open_station: Any) -> None:
    async with open_station(script(Compute(128), Compute(128))) as station:
        with pytest.raises(EngineError, match="context takes"):
            await station.round(prompt_of(5000), 2)
        assert [call[:2] for call in station.engine.calls] == [(5000, 2)]


async def test_a_prefill_for_another_worker_is_cut_behind_what_was_read(open_station: Any) -> None:
    """The history comes from its holder under the id of the first slice: read once, computed never."""
    policy = script(Compute(64), Compute(64), Compute(64))
    async with open_station(policy) as station, station.lab.engine("H") as holder:
        history = prompt_of(320)
        await run(holder, history, 1)
        prompt = history + prompt_of(180, seed=2)
        station.times.prefills.clear()
        request: Any = message(prompt, 5, "s", hist=320, source="H")
        async with aclosing(station.rounds.prefill(request)) as chunks:
            (chunk,) = [chunk async for chunk in chunks]
        assert station.engine.calls == [(384, 0, 320), (448, 0, 384), (500, 1, 448)]
        assert station.engine.are_copies == [True, True, True]
        assert station.times.prefills == [(320, 64), (384, 64), (448, 52)]
        # KV is read only where that is predicted to be faster than computing it.
        asked = station.predicted.prefills
        assert (320, 180) in asked[: asked.index((0, 500))]
        assert policy.asked == [(320, 180), (320, 180), (384, 116), (448, 52)]
        report = chunk["ampd"]
        assert (report["kv_read_tokens"], report["cached_tokens"], report["slices"]) == (320, 320, 3)
        assert report["hit_tokens"] == {"device": 0, "store": 0, "peer": 320, "recomputed": 0}
        assert protects_nothing(holder)
        assert chunk["token_ids"] == tokens(await run(holder, prompt, 1))


async def test_the_ordering_chooses_again_between_two_slices(open_station: Any) -> None:
    policy = script(Compute(400), Compute(400))
    async with open_station(policy, "shortest-prefill-first") as station:
        station.times.per_token_s = 0.0001
        long = asyncio.create_task(station.round(prompt_of(800), 2, session="long"))
        await until(lambda: station.engine.calls)
        short = asyncio.create_task(station.round(prompt_of(100, seed=2), 2, session="short"))
        await asyncio.wait({long, short})
        assert station.engine.calls == [(400, 0, 0), (100, 2, 0), (800, 2, 400)]
        assert station.queue.tasks() == ()


# -- beside a batch


async def test_the_batch_gets_a_step_between_two_slices(open_station: Any) -> None:
    async with open_station(create("slicing", "whole")) as station:
        station.times.step_s, station.times.per_token_s = 0.001, 0.00002
        log: list[str] = []
        note(station.times, log)
        decoding = asyncio.create_task(station.round(prompt_of(64), 2000, session="a"))
        await until(lambda: station.times.steps)
        station.slicing.now = script(Compute(64), Compute(64), Compute(64))
        log.clear()
        await station.round(prompt_of(300, seed=2), 1, session="b")
        decoding.cancel()
        await asyncio.wait({decoding})
    kinds = "".join(log)
    assert kinds.count("P") == 3
    assert "PP" not in kinds


@dataclass
class Turns:
    """Turns of 320 tokens, and passes of 64, or none yet."""

    holds: bool = False
    is_whole: bool = False
    shares_passes: bool = True

    def slice(self, situation: SlicingSituation) -> Slice:
        return Wait(1.0) if self.holds else Compute(min(64, situation.task.incr_tokens))

    def turn(self, situation: SlicingSituation) -> int:
        return min(320, situation.task.incr_tokens)


async def test_the_batch_gets_its_steps_within_passes_of_an_engine_that_shares_them(open_station: Any) -> None:
    async with open_station(create("slicing", "whole")) as station:
        expected = out(await station.round(prompt_of(900, seed=2), 3, session="long"))
    policy = Turns()
    async with open_station(policy) as station:
        station.slicing.shares_passes = True
        station.engine._engine.sizes = PassSizes(policy, Times(), Parallelism(), 16)
        station.times.step_s = 0.001
        decoding = asyncio.create_task(station.round(prompt_of(64), 4000, session="a"))
        await until(lambda: station.times.steps)
        station.times.prefills.clear()
        policy.holds = True
        long = asyncio.create_task(station.round(prompt_of(900, seed=2), 3, session="long"))
        await until(lambda: len(station.queue.tasks()) == 1)
        short = asyncio.create_task(station.round(prompt_of(100, seed=3), 2, session="short"))
        await until(lambda: len(station.queue.tasks()) == 2)
        policy.holds = False
        chunks = await long
        await short
        assert out(chunks) == expected
        assert not decoding.done()
        assert station.engine.calls[1:] == [(320, 0, 0), (100, 2, 0), (640, 0, 320), (900, 3, 640)]
        # Passes of 64 tokens and the batch's own; the next prefill was there when the turn's last pass was over.
        sizes = [tokens for _, tokens in station.times.prefills]
        assert sizes[:7] == [65, 65, 65, 65, 65, 65, 37]
        decoding.cancel()
        await asyncio.wait({decoding})
        assert station.queue.tasks() == ()


def note(times: Any, log: list[str]) -> None:
    prefill_s, step_s = times.prefill_s, times.decode_step_s

    def noted_prefill_s(*arguments: Any) -> float:
        log.append("P")
        return float(prefill_s(*arguments))

    def noted_step_s(*arguments: Any) -> float:
        log.append("d")
        return float(step_s(*arguments))

    times.prefill_s, times.decode_step_s = noted_prefill_s, noted_step_s


async def test_the_policy_sees_the_rounds_that_decode(open_station: Any) -> None:
    policy = script()
    async with open_station(policy) as station:
        station.times.step_s = 0.001
        local = asyncio.create_task(station.round(prompt_of(64), 2000, session="a", itl_s=0.05))
        handed = asyncio.create_task(station.round(prompt_of(33, seed=3), 2000, session="b", itl_s=0.07, source="gone"))
        await until(lambda: sum(batch == 2 for batch, _ in station.times.steps) > 20)
        await station.round(prompt_of(100, seed=2), 2, session="c")
        seen = {round_.itl_slo_s: round_ for round_ in policy.running[-1]}
        assert set(seen) == {0.05, 0.07}
        # What was handed over came with its first token: that one counts, and is part of its prompt already.
        assert seen[0.05].context_tokens == 64 + seen[0.05].tokens
        assert seen[0.07].context_tokens == 33 + seen[0.07].tokens - 1
        assert all(round_.tokens > 10 and round_.elapsed_s > 0.01 for round_ in seen.values())
        for task in (local, handed):
            task.cancel()
        await asyncio.wait({local, handed})
        await station.round(prompt_of(100, seed=4), 2, session="d")
        assert policy.running[-1] == ()


async def test_a_wait_leaves_the_worker_to_the_batch_and_ends_with_it(open_station: Any) -> None:
    async with open_station(script()) as station:
        station.times.step_s = 0.001
        decoding = asyncio.create_task(station.round(prompt_of(64), 2000, session="a"))
        await until(lambda: station.times.steps)
        station.slicing.now = policy = script(Compute(64), Compute(64), *[Wait(100.0)] * 2)
        waiting = asyncio.create_task(station.round(prompt_of(300, seed=2), 2, session="b"))
        await until(lambda: len(policy.asked) == 3)
        steps = len(station.times.steps)
        await until(lambda: len(station.times.steps) > steps + 20)
        assert station.times.prefills[-1] == (0, 64)
        assert [task.session_id for task in station.queue.tasks()] == ["b"], "it keeps its place until its first token"
        decoding.cancel()
        async with asyncio.timeout(60):  # less than the policy's wait
            assert len(out(await waiting)) == 2
        # It was told to wait again, but there was nobody left to wait for.
        assert len(policy.asked) == 4
        assert station.times.prefills[-1] == (64, 236)


@dataclass
class Companions:
    """An ordering that picks the first, and after the first slice all that wait, for one pass."""

    asked: int = 0

    def pick(self, situation: OrderingSituation) -> Pick:
        self.asked += 1
        return Run(0, together=tuple(range(1, len(situation.queue))) if self.asked > 1 else ())


def test_what_is_left_of_a_cut_prefill_waits_for_the_batch_in_a_pass_too(
    open_station: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with open_station(script()) as station:
            station.times.step_s = 0.001
            decoding = asyncio.create_task(station.round(prompt_of(64), 2000, session="a"))
            await until(lambda: station.times.steps)
            station.ordering.now = Companions()
            answers: list[Compute | Wait] = [Compute(64), Compute(64), *[Wait(100.0)] * 100]
            station.slicing.now = policy = script(*answers)
            station.times.per_token_s = 0.001
            cut = asyncio.create_task(station.round(prompt_of(300, seed=2), 2, session="b"))
            await until(lambda: len(policy.asked) == 2)
            mate = asyncio.create_task(station.round(prompt_of(100, seed=3), 2, session="c"))
            await until(lambda: len(policy.asked) >= 4)
            steps = len(station.times.steps)
            await until(lambda: len(station.times.steps) > steps + 20)
            assert station.times.prefills[-1] == (0, 64), "both wait"
            # Both ask for the whole pass: 236 tokens that are left of the one behind its 64, and 100 of the other.
            assert policy.asked[2:4] == [(64 * 236 // 336, 336)] * 2
            decoding.cancel()
            async with asyncio.timeout(10):
                assert [len(out(await task)) for task in (cut, mate)] == [2, 2]

    # In virtual time, because the mate must arrive during the first slice.
    run_virtually(scenario(), monkeypatch, "workers.engines.modelled_request")


STEP_S = 0.02
BARELY_S = (STEP_S + 0.0003) / SlackSlicing.ITL_SHARE
"""An ITL target of which a step leaves 0.3 ms: a round with it pays for the shortest slice in dozens of steps."""


async def ttft_beside(station: Station, loop_time: Callable[[], float], itl_s: float | None) -> float:
    """Seconds until the first token of a prompt that computes for 0.27 s, beside a stream with an ITL target."""
    station.times.step_s, station.times.per_token_s = STEP_S, 0.00027
    decoding = None
    if itl_s is not None:
        decoding = asyncio.create_task(station.round(prompt_of(64), 3000, session="a", itl_s=itl_s))
        await until(lambda: station.times.steps)
    begun_s = loop_time()
    await station.round(prompt_of(1000, seed=2), 1, session="b", ttft_s=2.0)
    if decoding is not None:
        decoding.cancel()
        await asyncio.wait({decoding})
    return loop_time() - begun_s


@pytest.mark.parametrize(("itl_s", "factor"), [(0.1, 1.5), (BARELY_S, 3.5)])
def test_the_target_of_a_neighbour_does_not_delay_a_first_token_for_long(
    open_station: Any, monkeypatch: pytest.MonkeyPatch, itl_s: float, factor: float
) -> None:
    """Without the bound on the wait for tighter targets it took 71 times as long."""

    async def scenario() -> None:
        loop_time = asyncio.get_running_loop().time
        async with open_station(create("slicing", "slack")) as station:
            alone_s = await ttft_beside(station, loop_time, None)
        async with open_station(create("slicing", "slack")) as station:
            beside_s = await ttft_beside(station, loop_time, itl_s)
        assert alone_s == pytest.approx(0.27, rel=0.1)
        assert beside_s / alone_s < factor

    run_virtually(scenario(), monkeypatch, "workers.engines.modelled_request")


def test_a_prefill_that_waits_for_the_batch_lets_a_more_urgent_one_pass(
    open_station: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that chooses a loose target for its own prefill does not keep the only slot with it."""

    async def scenario() -> None:
        async with open_station(script()) as station:
            station.times.step_s, station.times.per_token_s = 0.001, 0.0001
            decoding = asyncio.create_task(station.round(prompt_of(64), 20_000, session="a"))
            await until(lambda: station.times.steps)
            answers: list[Compute | Wait] = [Compute(64), Compute(64), Wait(5.0), Compute(ENOUGH)]
            station.slicing.now = policy = script(*answers)
            loose = asyncio.create_task(station.round(prompt_of(300, seed=2), 1, session="b", ttft_s=20.0))
            await until(lambda: len(policy.asked) == 3)
            begun_s = asyncio.get_running_loop().time()
            equal = asyncio.create_task(station.round(prompt_of(80, seed=3), 1, session="c", ttft_s=20.0))
            await until(lambda: len(station.queue.tasks()) == 2)
            assert len(policy.asked) == 3, "the slot stays with the first of two equals"
            equal.cancel()
            await asyncio.wait({equal})
            urgent = asyncio.create_task(station.round(prompt_of(100, seed=4), 1, session="d", ttft_s=1.0))
            await asyncio.wait({urgent})
            assert not loose.done()
            assert asyncio.get_running_loop().time() - begun_s < 1.0
            await loose
            decoding.cancel()
            await asyncio.wait({decoding})
            assert [call[0] for call in station.engine.calls] == [64, 64, 100, 300], "the urgent one passed"
            assert station.queue.tasks() == ()

    run_virtually(scenario(), monkeypatch, "workers.engines.modelled_request")


@pytest.mark.parametrize("stage", ["computing", "waiting"])
async def test_a_client_that_goes_between_slices_leaves_nothing(open_station: Any, stage: str) -> None:
    policy = script()
    async with open_station(policy, follows_times=False) as station:
        station.times.step_s = 0.001
        decoding = asyncio.create_task(station.round(prompt_of(64), 4000, session="a"))
        await until(lambda: station.times.steps)

        def answers() -> Iterator[Slice]:
            yield from (Compute(64), Compute(64))
            station.times.per_token_s = 100.0
            yield Wait(100.0) if stage == "waiting" else Compute(128)

        policy.answers = answers()
        leaver = asyncio.create_task(station.round(prompt_of(300, seed=2), 2, session="b"))
        await until(lambda: len(policy.asked) == 4 and len(station.times.prefills) == (2 if stage == "waiting" else 3))
        leaver.cancel()
        await asyncio.wait({leaver})
        station.times.per_token_s = 0.0
        assert station.queue.tasks() == ()
        assert station.rounds.running == 1
        async with asyncio.timeout(60):  # less than the leaver's wait
            assert len(out(await station.round(prompt_of(100, seed=5), 2, session="c"))) == 2
        decoding.cancel()
        await asyncio.wait({decoding})
        assert station.rounds.running == 0
        assert protects_nothing(station.engine), "no session counts as running any more"
