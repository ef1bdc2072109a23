"""Sizes of the passes of SGLang's scheduler, for requests that only have the fields which are read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from ampd.perf.presets import load_performance_model
from ampd.policies.registry import SLICING
from ampd.serving.pass_sizes import PassSizes
from ampd.types import Parallelism, PrefillTask, RunningRound, Slo
from tests.ampd.serving.fixed_slices import FixedSlices
from tests.harness.told_slices import FAILS, ToldSlices, told
from workers.engines import sglang_passes
from workers.engines.base import EngineRequest
from workers.engines.sglang_passes import (
    Chunk,
    Known,
    Prefills,
    begun_passes,
    defer_prefill,
    known,
    next_chunk,
    note_first_tokens,
    pass_params,
    running_rounds,
    sized_prefill,
)

PAGE, MOST = 16, 2048
NOW_S = 100.0


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_passes, "attention_backend", lambda server_args: server_args)
    SLICING.names()
    monkeypatch.setitem(SLICING._policies, "told", ToldSlices)


def sizes(policy: FixedSlices, *, saves: bool = True) -> PassSizes:
    model = load_performance_model("qwen3-32b-h20", None if saves else "a backend that was not measured")
    return PassSizes(policy, model, Parallelism(), PAGE)


def task(hist_tokens: int = 0, incr_tokens: int = 1, itl_s: float = 0.1) -> PrefillTask:
    return PrefillTask("t", "s", hist_tokens, incr_tokens, 90.0, Slo(1.0, itl_s), 2, True, True)


def request(
    prompt: int,
    output: int = 0,
    task: PrefillTask | None = None,
    *,
    first_s: float | None = None,
    tells: bool = False,
    prefix: int = 0,
    matched: int = 0,
    most_output: int = 100,
    rid: str = "r",
) -> Any:
    """A request as SGLang's scheduler has it."""
    asked = EngineRequest(
        rid, "s", [], 0, task=task, first_s=first_s, on_pass=(lambda _left, _is_last: None) if tells else None
    )
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[1] * prompt,
        output_ids=[1] * output,
        prefix_len=prefix,
        num_matched_prefix_tokens=matched,
        sampling_params=SimpleNamespace(max_new_tokens=most_output, **pass_params(asked) or {"custom_params": None}),
    )


def handed_over(prompt: int, matched: int = 0) -> Any:
    """A round that was prefilled elsewhere, as the worker sends it."""
    return request(prompt, task=task(prompt - 1, 1), first_s=95.0, matched=matched)


STREAM = request(100, 5, task())


def chunk(
    chunked: Any,
    waiting: list[Any],
    policy: FixedSlices,
    running: list[Any] | None = None,
    *,
    saves: bool = True,
    has_paused: bool = False,
) -> Chunk:
    rows = [STREAM] if running is None else running
    prefills = Prefills.of(chunked, waiting, PAGE)
    return next_chunk(
        prefills, rows, sizes(policy, saves=saves), NOW_S, page_tokens=PAGE, most_tokens=MOST, has_paused=has_paused
    )


def mixed(tokens: int) -> Chunk:
    return Chunk(tokens, is_mixed=True)


ALONE = Chunk(0, is_mixed=False)


def test_what_is_known_of_a_request_is_the_same_in_the_scheduler() -> None:
    assert known(request(37, task=task(32, 5), first_s=95.0, tells=True)) == Known(task(32, 5), True, 95.0, True)
    assert known(request(37, task=task(32, 5))) == Known(task(32, 5), False, None, False)
    assert known(request(37)) == Known()
    asked = EngineRequest("r", "s", [], 0, task=task(), on_pass=lambda _left, _is_last: None)
    assert not known(SimpleNamespace(sampling_params=SimpleNamespace(**pass_params(asked, tells=False)))).tells


def test_the_policy_is_asked_for_all_prefills_behind_the_history_of_the_one_that_has_begun() -> None:
    policy = FixedSlices(64)
    begun = request(700, task=task(0, 700), prefix=320)
    waiting = [request(200, task=task(96, 104)), request(50, task=task(), matched=32)]
    assert chunk(begun, waiting, policy) == mixed(64 + 1), "a row of the batch is a token, too"
    assert policy.situation is not None
    assert policy.situation.task == task(0, 700).with_tokens(320, 380 + 104 + 18)
    assert policy.situation.now_s == NOW_S


def test_what_came_first_is_the_oldest_if_none_has_begun() -> None:
    """SGLang has sorted its queue by length."""
    policy = FixedSlices(64)
    late = request(50, task=replace(task(0, 50), arrival_s=91.0))
    waiting = [handed_over(100), late, request(200, task=task(96, 104))]
    assert chunk(None, waiting, policy) == mixed(64 + 16 + 1)
    assert policy.situation is not None
    assert policy.situation.task == task(96, 104 + 50)
    begun = request(700, task=replace(task(0, 700), arrival_s=99.0), prefix=320)
    assert chunk(begun, [late], policy) == mixed(64 + 1)
    assert policy.situation.task.hist_tokens == 320, "one that has begun goes on"


def test_what_is_left_is_taken_whole_in_full_pages_of_each() -> None:
    begun = request(700, task=task(0, 700), prefix=690)
    assert chunk(begun, [request(40, task=task(0, 40))], FixedSlices(50)) == mixed(16 + 48 + 1)


def test_handed_over_rounds_have_their_own_room_and_need_a_page_of_the_prefill_that_has_begun() -> None:
    begun = request(700, task=task(0, 700), prefix=320)
    rounds = [handed_over(100), handed_over(200, matched=199)]
    assert chunk(begun, rounds, FixedSlices(64)) == mixed(64 + 2 * 16 + 1)
    assert chunk(begun, rounds, FixedSlices(0)) == mixed(16 + 2 * 16 + 1)
    assert chunk(None, rounds, FixedSlices(0)) == mixed(2 * 16 + 1)


def test_a_round_whose_kv_was_lost_on_the_way_is_a_prefill() -> None:
    assert chunk(None, [handed_over(700, matched=16)], FixedSlices(0)) == ALONE
    assert chunk(None, [handed_over(700, matched=16)], FixedSlices(64)) == mixed(64 + 1)


def test_a_step_of_the_batch_alone() -> None:
    assert chunk(None, [request(700, task=task(0, 700))], FixedSlices(0)) == ALONE


def test_no_chunk_is_larger_than_the_configured_one() -> None:
    long = request(9000, task=task(0, 9000))
    assert chunk(None, [long], FixedSlices(9000)) == mixed((MOST - 16) + 1)


def test_requests_without_targets_are_computed_whole_and_nobody_waits_for_them() -> None:
    policy = FixedSlices(0)
    assert chunk(None, [request(700)], policy) == mixed(704 + 1)
    assert chunk(None, [request(700), request(50, task=task(0, 50))], policy) == mixed(704 + 64 + 1)
    chunk(None, [request(700, task=task(0, 700))], policy, running=[request(10, 5)])
    seen = policy.situation
    assert seen is not None
    assert [round_.itl_slo_s for round_ in seen.running] == [inf]


def test_where_mixed_passes_save_nothing_the_batch_pauses_and_then_makes_a_step() -> None:
    long = [request(700, task=task(0, 700))]
    assert chunk(None, long, FixedSlices(64), saves=False) == Chunk(64, is_mixed=False)
    assert chunk(None, long, FixedSlices(64), saves=False, has_paused=True) == ALONE
    assert chunk(None, long, FixedSlices(64), has_paused=True) == mixed(64 + 1)
    rounds = [handed_over(100)]
    assert chunk(None, rounds, FixedSlices(0), saves=False, has_paused=True) == Chunk(16, is_mixed=False)


def test_running_rounds_have_their_tokens_and_times() -> None:
    stream = request(100, 5, task(itl_s=0.2))
    joined = request(60, 2, task(), first_s=95.0)
    fresh = request(30, 0, task())
    no_more = request(30, 0, task(), most_output=0)
    running = [stream, joined, fresh, no_more, request(10, 3)]
    note_first_tokens(running, 98.0)
    note_first_tokens(running, 99.0)
    assert running_rounds(running, [handed_over(80)], NOW_S) == [
        RunningRound(5, 2.0, 0.2, 105),
        RunningRound(3, 5.0, 0.1, 62),
        RunningRound(1, 0.0, 0.1, 30),
        RunningRound(3, 2.0, inf, 13),
        RunningRound(1, 5.0, 0.1, 80),
    ]


def test_the_worker_is_told_what_is_left_of_prefills_in_passes_beside_the_batch() -> None:
    done, row = request(10, task=task(), tells=True, rid="done"), request(10, 1, task(), tells=True)
    begun = request(700, task=task(), tells=True, prefix=320, rid="begun")
    begun.extend_end = 384
    quiet = request(10, task=task())
    batch = SimpleNamespace(reqs=[done, begun, quiet, row], decoding_reqs=[row])
    assert begun_passes(batch, begun, is_beside=True) == [("done", 0, True), ("begun", 316, False)]
    assert begun_passes(SimpleNamespace(reqs=[done], decoding_reqs=None), None, is_beside=True) == [("done", 0, True)]
    assert begun_passes(SimpleNamespace(reqs=[done, begun], decoding_reqs=None), begun, is_beside=False) == [
        ("begun", 316, False)
    ], "without a batch the end of a pass tells as much"
    assert begun_passes(None, None, is_beside=True) == []


def test_the_worker_is_told_of_the_last_pass_and_the_scheduler_notes_a_pause() -> None:
    done = request(10, task=task(), tells=True, rid="done")
    scheduler = Scheduler()
    for decoding, has_paused in (([STREAM], False), (None, True)):
        batch = SimpleNamespace(reqs=[done, *(decoding or ())], decoding_reqs=decoding)
        sized_prefill(lambda *_, made=batch: SimpleNamespace(batch_to_run=made), scheduler, SimpleNamespace(reqs=[1]))
        assert scheduler.ampd_passes.has_paused is has_paused
    sized_prefill(lambda *_: SimpleNamespace(batch_to_run=None), scheduler, SimpleNamespace(reqs=[STREAM]))
    assert scheduler.told == [("done", 0, True)] * 2
    assert not scheduler.ampd_passes.has_paused


@dataclass
class Scheduler:
    """The fields of SGLang's scheduler that are read."""

    chunked_req: Any = None
    waiting_queue: list[Any] = field(default_factory=list)
    chunked_prefill_size: int = MOST
    page_size: int = PAGE
    is_mixed_chunk: bool = True
    truncation_align_size: int | None = None
    passes: dict[str, str] | None = field(
        default_factory=lambda: {"slicing": "told", "perf": "qwen3-32b-h20", "role": "decode"}
    )
    told: list[tuple[str, int, bool]] = field(default_factory=list)
    server_args: str = "calculated"
    ampd_passes: Any = None

    def __post_init__(self) -> None:
        linker = SimpleNamespace(passes=self.passes, tell_passes=self.told.extend)
        self.tree_cache = SimpleNamespace(linker=SimpleNamespace(cache_linker=linker), supports_mamba=lambda: False)
        self.grammar_manager = SimpleNamespace(grammar_queue=list[Any]())
        self.tp_group = SimpleNamespace(world_size=1, rank_in_group=0)


def made_chunk(scheduler: Scheduler, running: list[Any]) -> int:
    """The chunk with which SGLang makes its next batch; 0: it makes a step of the batch alone."""
    batch = SimpleNamespace(reqs=running)
    if defer_prefill(lambda *_: False, scheduler, batch):
        return 0
    chunks = []

    def make(_scheduler: Any, _running: Any) -> Any:
        chunks.append(scheduler.chunked_prefill_size)
        return SimpleNamespace(batch_to_run=None)

    sized_prefill(make, scheduler, batch)
    assert (scheduler.chunked_prefill_size, scheduler.is_mixed_chunk) == (MOST, True), (
        "SGLang reads them elsewhere, too"
    )
    return int(chunks[0])


def waiting(tokens: int, after: int = 0) -> list[Any]:
    """A prefill, with what the policy says of it."""
    return [request(700, task=told(tokens, after, 0, 700))]


@pytest.mark.parametrize(("after", "tokens"), [(5, 65), (6, 0)])
def test_the_scheduler_makes_its_batch_with_what_the_policy_says(after: int, tokens: int) -> None:
    scheduler = Scheduler(waiting_queue=waiting(64, after))
    assert made_chunk(scheduler, [STREAM]) == tokens
    assert made_chunk(scheduler, []) == MOST, "without a batch"
    scheduler.grammar_manager.grammar_queue, scheduler.waiting_queue = scheduler.waiting_queue, []
    assert made_chunk(scheduler, [STREAM]) == tokens, "its grammar may become ready for this pass"
    scheduler.grammar_manager.grammar_queue.clear()
    assert made_chunk(scheduler, [STREAM]) == MOST, "there is nothing to prefill"


def test_without_a_model_sglang_cuts_as_by_itself() -> None:
    assert made_chunk(Scheduler(waiting_queue=waiting(64), passes=None), [STREAM]) == MOST


def test_a_policy_that_fails_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(waiting_queue=waiting(FAILS))
    assert [made_chunk(scheduler, [STREAM]) for _ in range(2)] == [704 + 1, 704 + 1], "prefills are computed whole"
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_prefills_are_cut_where_sglang_may_cut_them() -> None:
    assert made_chunk(Scheduler(waiting_queue=waiting(200), truncation_align_size=96), [STREAM]) == 192 + 1


def test_what_sglang_defers_stays_deferred() -> None:
    assert defer_prefill(lambda *_: True, Scheduler(), SimpleNamespace(reqs=[]))
    scheduler = Scheduler(waiting_queue=waiting(64, after=6), is_mixed_chunk=False)
    assert not defer_prefill(lambda *_: False, scheduler, SimpleNamespace(reqs=[STREAM]))
