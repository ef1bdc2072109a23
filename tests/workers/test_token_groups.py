"""Tokens that are held back: none is lost, none waits too long, and the first of a round and its end never wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from dynamo.llm import HttpError
from hypothesis import given
from hypothesis import strategies as st

from ampd.call_signatures import Verifier
from ampd.cli.serve.settings import ServeSettings
from ampd.handler_stream import Chunk, HandlerStream, Send, join_chunks
from ampd.wire import GENERATE_ENDPOINT
from tests.virtual_time import VirtualTimeLoop, run_virtually
from tests.workers.engines.modelled_lab import Lab, Times, prompt_of
from tests.workers.parts_lab import worker_parts
from tests.workers.rounds_lab import Recorded, message, out
from workers.call_guard import CallGuard
from workers.client_stream import MOST_HELD_S, grouped
from workers.component import Worker
from workers.settings import WorkerSettings
from workers.worker_recorder import WorkerRecorder

ITL_S = 0.1

Answer = list[tuple[float, Chunk]]
"""Chunks, and when they came to the reader."""

Result = TypeVar("Result")


class Broken(Exception):  # noqa: N818
    """The handler fails behind its last token."""


def chunk(*token_ids: int, index: int = 0, **fields: Any) -> Chunk:
    return {"token_ids": list(token_ids), "index": index, **fields}


def virtually(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


async def read(
    script: list[tuple[float, Chunk]], most_tokens: int, itl_slo_s: float = ITL_S, *, breaks: bool = False
) -> Answer:
    """What a reader gets of a handler that sends each chunk of `script` after a pause."""
    loop = asyncio.get_running_loop()

    async def serve(send: Send[Chunk]) -> None:
        with grouped(send, most_tokens, itl_slo_s) as send_grouped:
            for pause_s, each in script:
                await asyncio.sleep(pause_s)
                send_grouped(each)
            if breaks:
                raise Broken

    answer: Answer = []
    with suppress(Broken):
        async for part in HandlerStream(serve, join_chunks):
            answer.append((loop.time(), part))
    return answer


def tokens(answer: Answer) -> list[list[int]]:
    return [part["token_ids"] for _, part in answer]


@pytest.mark.parametrize(("most_tokens", "chunks"), [(1, [1] * 12), (4, [1, 4, 4, 2, 1]), (64, [1, 10, 1])])
def test_the_first_token_and_the_end_go_alone(most_tokens: int, chunks: list[int]) -> None:
    script = [(0.01, chunk(number)) for number in range(11)] + [(0.01, chunk(11, finish_reason="stop"))]
    answer = virtually(read(script, most_tokens))
    assert [len(part) for part in tokens(answer)] == chunks
    assert answer[0][0] == pytest.approx(0.01)
    assert answer[-1][0] == pytest.approx(0.12)


@pytest.mark.parametrize(
    ("most_tokens", "itl_slo_s", "held_s"),
    [(4, 0.1, 0.4), (16, 0.02, 0.32), (16, 60.0, MOST_HELD_S), (16, float("inf"), MOST_HELD_S)],
)
def test_no_token_is_held_for_longer_than_a_group_may_take(most_tokens: int, itl_slo_s: float, held_s: float) -> None:
    script = [(0.0, chunk(1)), (0.0, chunk(2)), (0.01, chunk(3)), (100.0, chunk(4, finish_reason="stop"))]
    answer = virtually(read(script, most_tokens, itl_slo_s))
    assert tokens(answer) == [[1], [2, 3], [4]]
    assert answer[1][0] == pytest.approx(held_s)


def test_after_a_wait_that_was_too_long_the_next_tokens_are_held_as_long_again() -> None:
    script = [(0.0, chunk(1)), (0.0, chunk(2)), (10.0, chunk(3)), (10.0, chunk(4))]
    answer = virtually(read(script, 4))
    assert [at_s for at_s, _ in answer] == pytest.approx([0.0, 0.4, 10.4, 20.0])


def test_a_round_at_the_pace_of_its_target_has_whole_groups() -> None:
    """The timer of a group does not cut the next one."""
    answer = virtually(read([(0.099, chunk(number)) for number in range(17)], 4))
    assert [len(part) for part in tokens(answer)] == [1, 4, 4, 4, 4]


def test_chunks_that_cannot_be_one_are_passed_on_one_after_the_other() -> None:
    script = [(0.01, chunk(1)), (0.01, chunk(2)), (0.01, chunk(3, log_probs=[-3.0])), (0.01, chunk(4))]
    assert tokens(virtually(read(script, 16))) == [[1], [2], [3], [4]]


def test_tokens_that_come_in_groups_are_not_held() -> None:
    script = [(0.0, chunk(1)), (1.0, chunk(2, 3, 4, 5)), (1.0, chunk(6)), (0.01, chunk(7, 8, 9, 10))]
    answer = virtually(read(script, 4))
    assert tokens(answer) == [[1], [2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert [at_s for at_s, _ in answer] == pytest.approx([0.0, 1.0, 2.01])


def test_an_error_comes_after_the_tokens_before_it() -> None:
    script = [(0.0, chunk(1)), (0.0, chunk(2)), (0.0, chunk(3))]
    assert tokens(virtually(read(script, 16, breaks=True))) == [[1], [2, 3]]


# -- whatever comes


def _scripts() -> st.SearchStrategy[list[tuple[float, Chunk]]]:
    pauses = st.sampled_from([0.0, 0.01, 0.09, 0.5, 3.0])
    choice = st.integers(0, 2)
    some_tokens = st.lists(st.integers(0, 9), max_size=4)
    more: st.SearchStrategy[dict[str, Any]] = st.sampled_from([{}, {}, {}, {"log_probs": True}, {"engine_data": {}}])
    parts = st.tuples(pauses, choice, some_tokens, more)
    return st.tuples(st.lists(parts, max_size=30), st.permutations([0, 1, 2])).map(_script)


def _script(drawn: tuple[list[tuple[float, int, list[int], dict[str, Any]]], list[int]]) -> list[tuple[float, Chunk]]:
    """Chunks of three choices, which end in any order. Each token is another one."""
    parts, ends = drawn
    script, number = [], 0
    for pause_s, index, some, more in parts:
        fields = dict(more)
        ids = list(range(number, number + len(some)))
        number += len(some)
        if "log_probs" in fields:
            fields["log_probs"] = [-float(token_id) for token_id in ids]
        script.append((pause_s, chunk(*ids, index=index, **fields)))
    script += [(0.01, chunk(10_000 + index, index=index, finish_reason="stop")) for index in ends]
    return script


def _content(chunks: list[Chunk], index: int) -> dict[str, list[Any]]:
    mine = [each for each in chunks if each["index"] == index]
    return {
        "token_ids": [token for each in mine for token in each["token_ids"]],
        "log_probs": [value for each in mine for value in each.get("log_probs", ())],
        "others": [each for each in mine if "finish_reason" in each or "engine_data" in each],
    }


@given(script=_scripts(), most_tokens=st.integers(1, 64), itl_slo_s=st.sampled_from([0.001, 0.05, 10.0]))
def test_a_reader_gets_the_same_in_the_same_order(
    script: list[tuple[float, Chunk]], most_tokens: int, itl_slo_s: float
) -> None:
    sent = [dict(each) for _, each in script]
    answer = virtually(read(script, most_tokens, itl_slo_s))
    got = [part for _, part in answer]
    for index in range(3):
        assert _content(got, index) == _content(sent, index)
    sent_s: dict[int, float] = {}
    now_s = 0.0
    for pause_s, each in script:
        now_s += pause_s
        sent_s.update(dict.fromkeys(each["token_ids"], now_s))
    longest_s = min(MOST_HELD_S, most_tokens * itl_slo_s) if most_tokens > 1 else 0.0
    begun: set[int] = set()
    for at_s, part in answer:
        for token_id in part["token_ids"]:
            held_s = at_s - sent_s[token_id]
            assert held_s <= longest_s + 1e-6
            if part["index"] not in begun or "finish_reason" in part:
                assert held_s <= 1e-6
        if part["token_ids"]:
            begun.add(part["index"])


# -- a worker


class Context:
    """Dynamo's context, without Dynamo."""

    trace_id = None

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}
        self.stopped = asyncio.Event()

    def id(self) -> str:
        return "round"

    def trace_headers(self) -> None:
        return None

    def is_stopped(self) -> bool:
        return self.stopped.is_set()

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        return asyncio.ensure_future(self.stopped.wait())


def handler(parts: Any) -> Callable[[Any, Context], HandlerStream[Chunk]]:
    """The handler of a worker's endpoint `generate`."""
    worker = Worker(cast(Any, None), parts, {}, CallGuard(Verifier((), "w"), WorkerRecorder()), cast(Any, None))
    return cast(Any, worker._guarded(GENERATE_ENDPOINT, parts.rounds.generate))


VIRTUAL = ("workers.publisher", "workers.pending_changes", "workers.engines.modelled_request")


@pytest.mark.parametrize("source", [None, "gone"], ids=["prefilled here", "prefilled elsewhere"])
def test_a_worker_sends_groups_of_tokens(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    async def scenario() -> None:
        lab, sizes, answers = Lab(model_folder, Times(step_s=0.02)), {}, {}
        async with lab.engine("D") as engine:
            for most_tokens in (1, 4):
                parts = worker_parts("D", engine, lab.times, stream_tokens=most_tokens)
                call = message(prompt_of(40), 12, "s", source=source)
                chunks = [part async for part in handler(parts)(call, Context())]
                sizes[most_tokens] = [len(part["token_ids"]) for part in chunks]
                answers[most_tokens] = out(chunks)
                assert chunks[-1]["finish_reason"] == "length"
                assert chunks[-1]["ampd"]
        assert sizes == {1: [1] * 12, 4: [1, 4, 4, 2, 1]}
        assert answers[1] == answers[4]

    run_virtually(scenario(), monkeypatch, *VIRTUAL)


async def test_nothing_starts_for_a_caller_that_has_gone(model_folder: Path) -> None:
    lab = Lab(model_folder, Times())
    async with lab.engine("D") as engine:
        recorded = Recorded(engine)
        context = Context()
        context.stopped.set()
        stream = handler(worker_parts("D", recorded, lab.times))(message(prompt_of(40), 12, "s"), context)
        assert [part async for part in stream] == []
        assert recorded.calls == []


def test_what_a_worker_held_when_it_died_is_computed_again(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator resumes a round behind the tokens that it has got."""

    async def scenario() -> None:
        lab, prompt = Lab(model_folder, Times(step_s=0.02)), prompt_of(40)
        async with lab.engine("dies") as engine, lab.engine("other") as other:
            whole = message(prompt, 30, "whole")
            expected = out([part async for part in handler(worker_parts("o", other, lab.times))(whole, Context())])

            dying = worker_parts("d", engine, lab.times, stream_tokens=8)
            stream = handler(dying)(message(prompt, 30, "s"), Context())
            got = [*(await anext(stream))["token_ids"], *(await anext(stream))["token_ids"]]
            await asyncio.sleep(0.07)
            await engine.stop()  # three tokens are held, and nobody reads them any more
            await stream.aclose()
            assert got == expected[:9]

            rest = message(prompt + got, 30 - len(got), "s")
            again = handler(worker_parts("o", other, lab.times, stream_tokens=8))(rest, Context())
            assert got + out([part async for part in again]) == expected

    run_virtually(scenario(), monkeypatch, *VIRTUAL)


def test_a_round_whose_client_goes_ends_while_tokens_are_held(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        lab, context = Lab(model_folder, Times(step_s=0.02)), Context()
        async with lab.engine("D") as engine:
            parts = worker_parts("D", engine, lab.times, stream_tokens=64)
            stream = handler(parts)(message(prompt_of(40), 3000, "s", itl_s=100.0), context)
            await anext(stream)
            await asyncio.sleep(0.1)
            context.stopped.set()
            assert len(out([part async for part in stream])) < 64
            assert parts.rounds.running == 0

    run_virtually(scenario(), monkeypatch, *VIRTUAL)


async def test_a_task_without_an_itl_target_cannot_be_read(model_folder: Path) -> None:
    lab = Lab(model_folder, Times())
    async with lab.engine("D") as engine:
        stream = handler(worker_parts("D", engine, lab.times, stream_tokens=4))({"task": {}}, Context())
        with pytest.raises(HttpError, match="cannot read the request"):
            await anext(stream)


@pytest.mark.parametrize("settings", [WorkerSettings, ServeSettings])
def test_the_size_of_a_group_is_checked(settings: Any, model_folder: Path) -> None:
    needed = {"role": "decode", "model": model_folder} if settings is WorkerSettings else {}
    assert settings(**needed).stream_tokens == 1
    for wrong in (0, 65):
        with pytest.raises(ValueError, match="stream_tokens"):
            settings(**needed, stream_tokens=wrong)
