"""SGLang engines whose prefills share their passes with the decode batch: the tokens of requests that run alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from ampd.keys import pack_tokens
from ampd.perf.presets import load_performance_model
from ampd.perf.profile import MixedPassCosts, write_profile
from ampd.policies.registry import MODULES_VARIABLE, SLICING
from ampd.tiny_model import make_tiny_model
from ampd.types import Factors, Parallelism, PrefillTask

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.engine_hooks import in_engine_processes
from tests.harness.sglang_pair import LocalPeers, empty, pair_settings, rid, text
from tests.harness.told_slices import FAILS, told
from tests.waiting import until
from tests.workers.parts_lab import worker_parts
from tests.workers.rounds_lab import chunks_of, message, out
from workers.engines.base import EngineRequest, OnPass
from workers.engines.sglang import SglangEngine

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("forked"),
]

STREAM, PROMPT = text(6, 64), text(5, 700)
SLICE_ENDS = (240, 480)
STREAM_TOKENS, NEW = 200, 24

PLAIN: dict[str, Any] = {"sampling_options": {"temperature": 0.0}, "stop_conditions": {"ignore_eos": True}}
CHOICES = {**PLAIN, "sampling_options": {"temperature": 0.0, "n": 3}}
PENALTY = {**PLAIN, "sampling_options": {"temperature": 0.0, "frequency_penalty": 0.7}}
GRAMMAR = {"sampling_options": {"temperature": 0.0, "guided_decoding": {"regex": "[a-f]{150}[0-9]*"}}}
LOG_PROBS = {**PLAIN, "output_options": {"logprobs": 2}}


def note_passes(path: str) -> None:
    """Write for each pass of a rank how many tokens it prefills, and how many requests decode in it.

    Whether a mixed pass pays is decided by the profile alone, because measured times are those of a busy machine.
    """
    from sglang.srt.managers.scheduler import Scheduler

    from ampd.serving import pass_sizes

    decided: Any = pass_sizes
    pays = decided.mixing_pays

    def by_the_profile(model: Any, *parts: Any) -> bool:
        answer: bool = pays(getattr(model, "model", model), *parts[:-1], Parallelism(parts[-1].tp))
        return answer

    decided.mixing_pays = by_the_profile

    choose = Scheduler.get_next_batch_to_run

    def noted(*args: Any, **options: Any) -> Any:
        plan = choose(*args, **options)
        if (batch := plan.batch_to_run) is not None:
            rows = batch.batch_size() if batch.forward_mode.is_decode() else len(batch.decoding_reqs or ())
            # A row of a mixed batch is a token of it.
            tokens = 0 if batch.forward_mode.is_decode() else batch.extend_num_tokens - rows
            with (Path(path) / str(os.getpid())).open("a") as notes:
                notes.write(f"{tokens} {rows}\n")
        return plan

    patched: Any = Scheduler
    patched.get_next_batch_to_run = noted


@dataclass
class Outputs:
    """What one call gave: tokens and log-probabilities by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    log_probs: list[float] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass
class Sharing:
    """An engine, and a folder with the passes that each rank of it has computed."""

    engine: SglangEngine
    notes: Path
    seen: int = 0
    made_alone: dict[str, Outputs] = field(default_factory=dict)

    def forget(self) -> None:
        """Forget the passes so far."""
        self.seen += len(self._since()[0])

    def passes(self) -> list[tuple[int, int]]:
        """(tokens that are prefilled, requests that decode beside them) since the last call; nothing may run."""
        ranks = self._since()
        assert ranks[1:] == ranks[:1] * (len(ranks) - 1), "the ranks compute the same"
        self.seen += len(ranks[0])
        return ranks[0]

    def _since(self) -> list[list[tuple[int, int]]]:
        """The same by rank. The last line of a rank that still runs may be incomplete."""
        ranks = []
        for path in sorted(self.notes.iterdir()):
            lines = path.read_text().split("\n")[self.seen : -1]
            ranks.append([(int(tokens), int(rows)) for tokens, rows in map(str.split, lines)])
        return ranks

    async def call(
        self,
        prompt: list[int],
        new: int,
        request: dict[str, Any],
        into: Outputs | None = None,
        task: PrefillTask | None = None,
        on_pass: OnPass | None = None,
    ) -> Outputs:
        made = Outputs() if into is None else into
        asked = EngineRequest(rid(), "", prompt, new, request, task=task, on_pass=on_pass)
        async with aclosing(cast(Any, self.engine.generate(asked))) as outputs:
            async for output in outputs:
                made.tokens.setdefault(output.index, []).extend(output.token_ids)
                made.log_probs += output.log_probs or []
                made.cached_tokens = output.cached_tokens
        return made

    async def alone(self, request: dict[str, Any], prompt: list[int], new: int) -> Outputs:
        """What a request gives while nothing else runs. It is computed once, because it is always the same."""
        asked = repr((request, prompt, new))
        if asked not in self.made_alone:
            self.made_alone[asked] = await self.call(prompt, new, request)
            await empty(self.engine)
        return self.made_alone[asked]

    async def beside(self, stream: dict[str, Any], sliced: dict[str, Any]) -> tuple[Outputs, Outputs]:
        """A stream that decodes, and three slices beside it. The passes before the first slice are forgotten."""
        async with self.streaming(stream) as first:
            for end in SLICE_ENDS:
                await self.call(PROMPT[:end], 0, sliced)
            second = await self.call(PROMPT, NEW, sliced)
        return first, second

    @asynccontextmanager
    async def streaming(
        self, stream: dict[str, Any] = PLAIN, task: PrefillTask | None = None, after: int = 5
    ) -> AsyncIterator[Outputs]:
        """A stream that decodes, has more than `after` tokens, and outlasts what is done beside it."""
        made = Outputs()
        decoding = asyncio.create_task(self.call(STREAM, STREAM_TOKENS, stream, made, task))
        choices = stream["sampling_options"].get("n", 1)
        await until(lambda: sum(len(tokens) > after for tokens in made.tokens.values()) == choices)
        self.forget()
        yield made
        assert not decoding.done()
        await decoding
        await empty(self.engine)


def profile(folder: Path, saved: float) -> Path:
    """A profile whose mixed passes with the backend of these engines save this share."""
    model = load_performance_model("tiny-cpu")
    known = {"torch_native": MixedPassCosts(saved=saved)}
    workers = tuple(curves.model_copy(update={"mixed_passes": known}) for curves in model.profile.workers)
    write_profile(model.profile.model_copy(update={"workers": workers}), folder / "profile.json")
    return folder / "profile.json"


def shared(passes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(tokens, rows) for tokens, rows in passes if tokens and rows]


@asynccontextmanager
async def sharing(folder: Path, tp: int = 1, saved: float = 1.0, **changed: object) -> AsyncIterator[Sharing]:
    notes = folder / "passes"
    notes.mkdir()
    settings = pair_settings(make_tiny_model(folder / "tiny"), tp).model_copy(update=changed)
    SLICING.names()  # this process must not import the module that the environment names below
    with pytest.MonkeyPatch.context() as patch, in_engine_processes(note_passes, str(notes)):
        patch.setenv(MODULES_VARIABLE, "tests.harness.told_policy")
        passes = {"slicing": "told", "perf": str(profile(folder, saved)), "role": "decode"}
        engine = SglangEngine(settings, passes=passes)
        try:
            await engine.start()
            engine.kv.connect(LocalPeers(), lambda *_: None)
            yield Sharing(engine, notes)
        finally:
            await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sharer(tmp_path_factory: pytest.TempPathFactory, forked: None) -> AsyncIterator[Sharing]:  # noqa: ARG001
    async with sharing(tmp_path_factory.mktemp("sharing")) as made:
        yield made


KINDS = {"plain": PLAIN, "choices": CHOICES, "penalty": PENALTY, "grammar": GRAMMAR}
PAIRS = [
    ("plain", "plain"),
    pytest.param("choices", "choices", marks=pytest.mark.matrix),
    pytest.param("penalty", "plain", marks=pytest.mark.matrix),
    ("plain", "penalty"),
    ("grammar", "plain"),
    ("plain", "grammar"),
    ("grammar", "choices"),
]


@pytest.mark.parametrize(("stream", "sliced"), PAIRS)
async def test_each_slice_is_a_step_of_the_batch_and_no_token_changes(
    sharer: Sharing, stream: str, sliced: str
) -> None:
    await check_slices(sharer, KINDS[stream], KINDS[sliced])


@pytest.mark.parametrize(("stream", "sliced"), [(LOG_PROBS, PLAIN), (PLAIN, LOG_PROBS)], ids=["stream", "slices"])
async def test_the_batch_pauses_for_log_probabilities_which_are_right(
    sharer: Sharing, stream: dict[str, Any], sliced: dict[str, Any]
) -> None:
    expected = await sharer.alone(stream, STREAM, STREAM_TOKENS), await sharer.alone(sliced, PROMPT, NEW)
    for got, alone in zip(await sharer.beside(stream, sliced), expected, strict=True):
        assert got.tokens == alone.tokens
        assert got.log_probs == pytest.approx(alone.log_probs, abs=1e-3)
    assert shared(sharer.passes()) == []


async def test_a_prompt_is_computed_in_passes_of_the_size_that_the_policy_says(sharer: Sharing) -> None:
    await check_sizes(sharer)


async def test_the_scheduler_tells_how_long_its_passes_take(sharer: Sharing) -> None:
    factors: list[Factors] = []
    sharer.engine.kv.store.on_factors = factors.append
    async with sharer.streaming(task=told(64)):
        await sharer.call(PROMPT, NEW, PLAIN, task=told(64))
    await until(lambda: bool(factors) and 1.0 not in (factors[-1].step, factors[-1].mixed, factors[-1].prefill))


async def check_sizes(sharing: Sharing) -> None:
    """A prompt that comes whole beside a stream: each of its passes is a step, none comes between, no token changes."""
    expected = await sharing.alone(PLAIN, STREAM, STREAM_TOKENS), await sharing.alone(PLAIN, PROMPT, NEW)
    second, told_passes = Outputs(), list[tuple[int, bool, int]]()

    def on_pass(left_tokens: int, is_last: bool) -> None:
        told_passes.append((left_tokens, is_last, len(second.tokens)))

    async with sharing.streaming(task=told(64)) as first:
        await sharing.call(PROMPT, NEW, PLAIN, second, told(64), on_pass)
    assert (first.tokens, second.tokens) == (expected[0].tokens, expected[1].tokens)
    passes = sharing.passes()
    begin = passes.index((64, 1))
    assert passes[begin : begin + 12] == [(64, 1)] * 10 + [(60, 1), (0, 2)]
    left = [*range(len(PROMPT) - 64, 0, -64), 0]
    assert told_passes == [(tokens, not tokens, 0) for tokens in left], "of each pass, before its token"


async def test_the_batch_decodes_alone_as_long_as_the_policy_says(sharer: Sharing) -> None:
    expected = await sharer.alone(PLAIN, PROMPT, NEW)
    async with sharer.streaming(task=told(64)) as first:
        got = await sharer.call(PROMPT, NEW, PLAIN, task=told(352, after=60))
        assert len(first.tokens[0]) > 60
    assert got.tokens == expected.tokens
    passes = sharer.passes()
    begin = next(at for at, (tokens, _) in enumerate(passes) if tokens)
    assert passes[begin : begin + 2] == [(352, 1), (348, 1)]
    decoded_after = len(passes) - begin - 2
    assert decoded_after == STREAM_TOKENS - 60 - 2, "it has begun at once when the stream had 60 tokens"


@pytest.mark.parametrize("has_begun", [True, False], ids=["begun", "waits"])
async def test_a_round_that_was_handed_over_does_not_wait_for_a_long_prefill(sharer: Sharing, has_begun: bool) -> None:
    handed, long = text(8, 100), PROMPT
    expected = await sharer.alone(PLAIN, handed, NEW), await sharer.alone(PLAIN, long, NEW)
    rounds = worker_parts("D", sharer.engine, load_performance_model("tiny-cpu")).rounds
    # In the store, as if it had been read. The store keeps what a session has.
    kept: Any = message(handed[:96], 0, "over")
    async with aclosing(chunks_of(rounds.generate, kept)) as chunks:
        assert [chunk async for chunk in chunks][-1]["ampd"]["held_tokens"] == 96
    # As a coordinator sends it: its history is what there was before the round.
    stops: dict[str, Any] = {**PLAIN["stop_conditions"], "max_tokens": NEW}
    over: Any = message(handed[:-1], NEW, "over", source="gone", **PLAIN | {"stop_conditions": stops})
    over["prompt"] = pack_tokens(handed)
    async with sharer.streaming(task=told(64)):
        task = told(16) if has_begun else told(336, after=120)
        prefill = asyncio.create_task(sharer.call(long, NEW, PLAIN, task=task))
        await until(lambda: any(tokens for tokens, _ in sharer._since()[0]) or not has_begun)
        async with aclosing(chunks_of(rounds.generate, over)) as chunks:
            assert out([chunk async for chunk in chunks]) == expected[0].tokens[0]
        assert not prefill.done()
        assert (await prefill).tokens == expected[1].tokens
    passes = sharer.passes()
    at = passes.index((20, 1) if has_begun else (4, 1))
    assert passes[at + 1] == ((16, 2) if has_begun else (0, 2))


async def test_a_policy_that_fails_leaves_prefills_whole(sharer: Sharing) -> None:
    expected = await sharer.alone(PLAIN, PROMPT, NEW)
    async with sharer.streaming(task=told(64)):
        got = await sharer.call(PROMPT, NEW, PLAIN, task=told(FAILS))
    assert got.tokens == expected.tokens
    assert shared(sharer.passes()) == [(len(PROMPT), 1)]


async def test_where_mixed_passes_save_nothing_the_batch_pauses_for_each_and_no_token_changes(tmp_path: Path) -> None:
    async with sharing(tmp_path, saved=0.0) as apart:
        expected = await apart.alone(PLAIN, STREAM, STREAM_TOKENS), await apart.alone(PLAIN, PROMPT, NEW)
        async with apart.streaming(task=told(64)) as first:
            second = await apart.call(PROMPT, NEW, PLAIN, task=told(64))
        assert (first.tokens, second.tokens) == (expected[0].tokens, expected[1].tokens)
        passes = apart.passes()
        begin = passes.index((64, 0))
        assert passes[begin : begin + 22] == [(64, 0), (0, 1)] * 10 + [(60, 0), (0, 2)]


async def test_two_ranks_with_the_overlapped_schedule_share_the_same_passes(tmp_path: Path) -> None:
    """SGLang prepares the next pass while one computes. By default it does so on a GPU only."""
    async with sharing(tmp_path, tp=2, engine_args='{"disable_overlap_schedule": false}') as overlapped:
        await check_sizes(overlapped)
        await check_slices(overlapped, PLAIN, PLAIN)
        await check_slices(overlapped, PLAIN, CHOICES)


async def check_slices(sharing: Sharing, stream: dict[str, Any], sliced: dict[str, Any]) -> None:
    """Slices beside a stream, each in a pass that is a step of the stream, give the tokens of requests alone."""
    expected = await sharing.alone(stream, STREAM, STREAM_TOKENS), await sharing.alone(sliced, PROMPT, NEW)
    got = await sharing.beside(stream, sliced)
    assert [each.tokens for each in got] == [each.tokens for each in expected]
    passes = shared(sharing.passes())
    assert passes[0] == (SLICE_ENDS[0], stream["sampling_options"].get("n", 1))
    assert sum(tokens for tokens, _ in passes) >= len(PROMPT), "all slices and the rest"
