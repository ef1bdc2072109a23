"""SGLang engines whose prefills share their passes with the decode batch: the tokens of requests that run alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from ampd.tiny_model import make_tiny_model

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.engine_hooks import in_engine_processes
from tests.harness.sglang_pair import LocalPeers, empty, pair_settings, rid, text
from tests.waiting import until
from workers.engines.base import EngineRequest
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


def note_shared_passes(path: str) -> None:
    """Write for each shared pass how many tokens it prefills, and how many requests decode in it."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    mix = ScheduleBatch.mix_with_running

    def noted(batch: Any, running: Any) -> None:
        with Path(path).open("a") as notes:
            notes.write(f"{batch.extend_num_tokens} {running.batch_size()}\n")
        mix(batch, running)

    patched: Any = ScheduleBatch
    patched.mix_with_running = noted


@dataclass
class Outputs:
    """What one call gave: tokens and log-probabilities by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    log_probs: list[float] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass
class Sharing:
    """An engine, and a file with the passes that a rank of it has shared."""

    engine: SglangEngine
    notes: Path

    def passes(self) -> list[tuple[int, int]]:
        """(tokens that are prefilled, requests that decode beside them) since the last call."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        self.notes.unlink(missing_ok=True)
        return [(int(tokens), int(rows)) for tokens, rows in map(str.split, lines)]

    async def call(self, prompt: list[int], new: int, request: dict[str, Any], into: Outputs | None = None) -> Outputs:
        made = Outputs() if into is None else into
        asked = EngineRequest(rid(), "", prompt, new, request)
        async with aclosing(cast(Any, self.engine.generate(asked))) as outputs:
            async for output in outputs:
                made.tokens.setdefault(output.index, []).extend(output.token_ids)
                made.log_probs += output.log_probs or []
                made.cached_tokens = output.cached_tokens
        return made

    async def alone(self, request: dict[str, Any], prompt: list[int], new: int) -> Outputs:
        made = await self.call(prompt, new, request)
        await empty(self.engine)
        return made

    async def beside(self, stream: dict[str, Any], sliced: dict[str, Any]) -> tuple[Outputs, Outputs]:
        """A stream that decodes, and three slices beside it. The passes before the first slice are forgotten."""
        first = Outputs()
        decoding = asyncio.create_task(self.call(STREAM, STREAM_TOKENS, stream, first))
        choices = stream["sampling_options"].get("n", 1)
        await until(lambda: sum(len(tokens) > 5 for tokens in first.tokens.values()) == choices)
        self.passes()
        for end in SLICE_ENDS:
            await self.call(PROMPT[:end], 0, sliced)
        second = await self.call(PROMPT, NEW, sliced)
        assert not decoding.done()
        await decoding
        await empty(self.engine)
        return first, second


@asynccontextmanager
async def sharing(folder: Path, tp: int = 1, **changed: object) -> AsyncIterator[Sharing]:
    notes = folder / "shared-passes"
    settings = pair_settings(make_tiny_model(folder / "tiny"), tp).model_copy(update=changed)
    with in_engine_processes(note_shared_passes, str(notes)):
        engine = SglangEngine(settings, shares_passes=True)
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
    ("choices", "choices"),
    ("penalty", "plain"),
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
    assert sharer.passes() == []


async def test_two_ranks_share_the_same_passes(tmp_path: Path) -> None:
    async with sharing(tmp_path, tp=2) as two:
        await check_slices(two, PLAIN, PLAIN, ranks=2)


async def test_the_overlapped_schedule_shares_the_same_passes(tmp_path: Path) -> None:
    """SGLang prepares the next pass while one computes. By default it does so on a GPU only."""
    async with sharing(tmp_path, engine_args='{"disable_overlap_schedule": false}') as overlapped:
        await check_slices(overlapped, PLAIN, PLAIN)
        await check_slices(overlapped, PLAIN, CHOICES)


async def check_slices(sharing: Sharing, stream: dict[str, Any], sliced: dict[str, Any], ranks: int = 1) -> None:
    """Slices beside a stream, each in a pass that is a step of the stream, give the tokens of requests alone."""
    expected = await sharing.alone(stream, STREAM, STREAM_TOKENS), await sharing.alone(sliced, PROMPT, NEW)
    got = await sharing.beside(stream, sliced)
    assert [each.tokens for each in got] == [each.tokens for each in expected]
    passes = sharing.passes()
    # Each rank notes its own.
    assert passes[:ranks] == [(SLICE_ENDS[0], stream["sampling_options"].get("n", 1))] * ranks
    assert sum(tokens for tokens, _ in passes) >= len(PROMPT) * ranks, "all slices and the rest"
