"""Sizes of the passes of SGLang's scheduler, for requests that only have the fields which are read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from ampd.perf.presets import load_performance_model
from ampd.policies.base import Compute, Wait
from ampd.policies.registry import SLICING
from ampd.serving.pass_sizes import PassSizes
from ampd.serving.slices import left_before, with_held
from ampd.types import Parallelism, PrefillTask, RunningRound, Slo
from tests.ampd.serving.fixed_slices import FixedSlices
from tests.harness.told_slices import FAILS, ToldSlices, told
from workers.engines.base import PassShare
from workers.engines.sglang_passes import (
    Known,
    Prefills,
    chunk_tokens,
    defer_prefill,
    known,
    last_passes,
    note_first_tokens,
    running_rounds,
    share_params,
    sized_prefill,
)

PAGE, MOST = 16, 2048
NOW_S = 100.0


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    SLICING.names()
    monkeypatch.setitem(SLICING._policies, "told", ToldSlices)


def sizes(policy: FixedSlices) -> PassSizes:
    return PassSizes(policy, load_performance_model("tiny-cpu"), Parallelism(), PAGE)


def task(hist_tokens: int = 0, incr_tokens: int = 1, itl_s: float = 0.1) -> PrefillTask:
    return PrefillTask("t", "s", hist_tokens, incr_tokens, 90.0, Slo(1.0, itl_s), 2, True, True)


def request(
    prompt: int,
    output: int = 0,
    share: PassShare | None = None,
    *,
    prefix: int = 0,
    matched: int = 0,
    most_output: int = 100,
    rid: str = "r",
) -> Any:
    """A request as SGLang's scheduler has it."""
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[1] * prompt,
        output_ids=[1] * output,
        prefix_len=prefix,
        num_matched_prefix_tokens=matched,
        sampling_params=SimpleNamespace(max_new_tokens=most_output, **share_params(share) or {"custom_params": None}),
    )


def handed_over(prompt: int, held_tokens: int, matched: int = 0) -> Any:
    """A round that was prefilled elsewhere, as the worker sends it: a coordinator's history says nothing of it."""
    left = with_held(left_before(task(0, prompt - 1), prompt), held_tokens, PAGE)
    return request(prompt, share=PassShare(left, first_s=95.0), matched=matched)


STREAM = request(100, 5, PassShare(task()))


def chunk(chunked: Any, waiting: list[Any], policy: FixedSlices, running: list[Any] | None = None) -> int:
    rows = [STREAM] if running is None else running
    prefills = Prefills.of(chunked, waiting, PAGE)
    return chunk_tokens(prefills, rows, sizes(policy), NOW_S, page_tokens=PAGE, most_tokens=MOST)


def test_a_share_is_the_same_in_the_scheduler() -> None:
    share = PassShare(task(32, 5), 95.0, lambda: None)
    assert known(request(37, share=share)) == Known(share.task, True, 95.0, True)
    assert known(request(37, share=PassShare(task(32, 5)))) == Known(task(32, 5), False, None, False)
    assert known(request(37)) == Known()
    assert not known(SimpleNamespace(sampling_params=SimpleNamespace(**share_params(share, tells=False)))).tells


def test_the_policy_is_asked_for_all_prefills_behind_the_history_of_the_one_that_has_begun() -> None:
    policy = FixedSlices(Compute(64))
    begun = request(700, share=PassShare(task(0, 700)), prefix=320)
    waiting = [request(200, share=PassShare(task(96, 104))), request(50, share=PassShare(task()), matched=32)]
    assert chunk(begun, waiting, policy) == 64 + 1, "a row of the batch is a token, too"
    assert policy.situation is not None
    assert policy.situation.task == task(0, 700).with_tokens(320, 380 + 104 + 18)
    assert policy.situation.now_s == NOW_S


def test_what_came_first_is_the_oldest_if_none_has_begun() -> None:
    """SGLang has sorted its queue by length."""
    policy = FixedSlices(Compute(64))
    late = request(50, share=PassShare(replace(task(0, 50), arrival_s=91.0)))
    waiting = [handed_over(100, 96), late, request(200, share=PassShare(task(96, 104)))]
    assert chunk(None, waiting, policy) == 64 + 16 + 1
    assert policy.situation is not None
    assert policy.situation.task == task(96, 104 + 50)
    begun = request(700, share=PassShare(replace(task(0, 700), arrival_s=99.0)), prefix=320)
    assert chunk(begun, [late], policy) == 64 + 1
    assert policy.situation.task.hist_tokens == 320, "one that has begun goes on"


def test_what_is_left_is_taken_whole_in_full_pages_of_each() -> None:
    begun = request(700, share=PassShare(task(0, 700)), prefix=690)
    assert chunk(begun, [request(40, share=PassShare(task(0, 40)))], FixedSlices(Compute(50))) == 16 + 48 + 1


def test_handed_over_rounds_have_their_own_room_and_need_a_page_of_the_prefill_that_has_begun() -> None:
    begun = request(700, share=PassShare(task(0, 700)), prefix=320)
    rounds = [handed_over(100, 96), handed_over(200, 0, matched=199)]
    assert chunk(begun, rounds, FixedSlices(Compute(64))) == 64 + 2 * 16 + 1
    assert chunk(begun, rounds, FixedSlices(Wait(1.0))) == 16 + 2 * 16 + 1
    assert chunk(None, rounds, FixedSlices(Wait(1.0))) == 2 * 16 + 1


def test_a_round_whose_kv_was_lost_on_the_way_is_a_prefill() -> None:
    assert chunk(None, [handed_over(700, 0)], FixedSlices(Wait(1.0))) == 0
    assert chunk(None, [handed_over(700, 0)], FixedSlices(Compute(64))) == 64 + 1


def test_a_step_of_the_batch_alone() -> None:
    assert chunk(None, [request(700, share=PassShare(task(0, 700)))], FixedSlices(Wait(1.0))) == 0


def test_no_chunk_is_larger_than_the_configured_one() -> None:
    long = request(9000, share=PassShare(task(0, 9000)))
    assert chunk(None, [long], FixedSlices(Compute(9000))) == (MOST - 16) + 1


def test_requests_without_targets_are_left_to_sglang() -> None:
    policy = FixedSlices(Wait(1.0))
    own = -1
    assert chunk(None, [request(700)], policy) == own
    assert chunk(None, [request(700), request(50, share=PassShare(task(0, 50)))], policy) == own
    assert policy.situation is None
    long = request(700, share=PassShare(task(0, 700)))
    assert chunk(None, [long], policy, running=[request(10, 5)]) == 704 + 1, "nobody minds"


def test_running_rounds_have_their_tokens_and_times() -> None:
    stream = request(100, 5, PassShare(task(itl_s=0.2)))
    joined = request(60, 2, PassShare(task(), first_s=95.0))
    fresh = request(30, 0, PassShare(task()))
    no_more = request(30, 0, PassShare(task()), most_output=0)
    running = [stream, joined, fresh, no_more, request(10, 3)]
    note_first_tokens(running, 98.0)
    note_first_tokens(running, 99.0)
    assert running_rounds(running, [handed_over(80, 64)], NOW_S) == [
        RunningRound(5, 2.0, 0.2, 105),
        RunningRound(3, 5.0, 0.1, 62),
        RunningRound(1, 0.0, 0.1, 30),
        RunningRound(1, 5.0, 0.1, 80),
    ]


def test_the_last_pass_is_that_of_prefills_which_are_not_cut() -> None:
    share = PassShare(task(), on_last_pass=lambda: None)
    done, cut, row = request(10, share=share, rid="done"), request(10, share=share), request(10, 1, share)
    quiet = request(10, share=PassShare(task()))
    mixed = SimpleNamespace(reqs=[done, cut, quiet, row], decoding_reqs=[row])
    assert last_passes(mixed, cut) == ["done"]
    assert last_passes(SimpleNamespace(reqs=[done], decoding_reqs=None), None) == [], "the batch did not step"


def test_the_worker_is_told_of_the_last_pass() -> None:
    done = request(10, share=PassShare(task(), on_last_pass=lambda: None), rid="done")
    batch = SimpleNamespace(reqs=[done, STREAM], decoding_reqs=[STREAM])
    scheduler = Scheduler()
    sized_prefill(lambda *_: SimpleNamespace(batch_to_run=batch), scheduler, SimpleNamespace(reqs=[STREAM]))
    sized_prefill(lambda *_: SimpleNamespace(batch_to_run=None), scheduler, SimpleNamespace(reqs=[STREAM]))
    assert scheduler.told_rids == ["done"]


@dataclass
class Scheduler:
    """The fields of SGLang's scheduler that are read."""

    chunked_req: Any = None
    waiting_queue: list[Any] = field(default_factory=list)
    chunked_prefill_size: int = MOST
    page_size: int = PAGE
    is_mixed_chunk: bool = True
    truncation_align_size: int | None = None
    passes: dict[str, str] | None = field(default_factory=lambda: {"slicing": "told", "perf": "tiny-cpu"})
    told_rids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        linker = SimpleNamespace(passes=self.passes, tell_last_passes=self.told_rids.extend)
        self.tree_cache = SimpleNamespace(linker=SimpleNamespace(cache_linker=linker), supports_mamba=lambda: False)
        self.grammar_manager = SimpleNamespace(grammar_queue=list[Any]())
        self.tp_group = SimpleNamespace(world_size=1, rank_in_group=0)


def next_chunk(scheduler: Scheduler, running: list[Any]) -> int:
    """The chunk with which SGLang makes its next batch; 0: it makes a step of the batch alone."""
    batch = SimpleNamespace(reqs=running)
    if defer_prefill(lambda *_: False, scheduler, batch):
        return 0
    chunks = []

    def make(_scheduler: Any, _running: Any) -> Any:
        chunks.append(scheduler.chunked_prefill_size)
        return SimpleNamespace(batch_to_run=None)

    sized_prefill(make, scheduler, batch)
    assert scheduler.chunked_prefill_size == MOST, "SGLang reads it elsewhere, too"
    return int(chunks[0])


def waiting(tokens: int, after: int = 0) -> list[Any]:
    """A prefill, with what the policy says of it."""
    return [request(700, share=PassShare(told(tokens, after, 0, 700)))]


@pytest.mark.parametrize(("after", "tokens"), [(5, 65), (6, 0)])
def test_the_scheduler_makes_its_batch_with_what_the_policy_says(after: int, tokens: int) -> None:
    scheduler = Scheduler(waiting_queue=waiting(64, after))
    assert next_chunk(scheduler, [STREAM]) == tokens
    assert next_chunk(scheduler, []) == MOST, "without a batch"
    scheduler.grammar_manager.grammar_queue, scheduler.waiting_queue = scheduler.waiting_queue, []
    assert next_chunk(scheduler, [STREAM]) == tokens, "its grammar may become ready for this pass"
    scheduler.grammar_manager.grammar_queue.clear()
    assert next_chunk(scheduler, [STREAM]) == MOST, "there is nothing to prefill"


def test_without_a_model_sglang_cuts_as_by_itself() -> None:
    assert next_chunk(Scheduler(waiting_queue=waiting(64), passes=None), [STREAM]) == MOST


def test_a_policy_that_fails_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(waiting_queue=waiting(FAILS))
    assert [next_chunk(scheduler, [STREAM]) for _ in range(2)] == [704 + 1, 704 + 1], "prefills are computed whole"
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_prefills_are_cut_where_sglang_may_cut_them() -> None:
    assert next_chunk(Scheduler(waiting_queue=waiting(200), truncation_align_size=96), [STREAM]) == 192 + 1


def test_what_sglang_defers_stays_deferred() -> None:
    assert defer_prefill(lambda *_: True, Scheduler(), SimpleNamespace(reqs=[]))
    scheduler = Scheduler(waiting_queue=waiting(64, after=6), is_mixed_chunk=False)
    assert not defer_prefill(lambda *_: False, scheduler, SimpleNamespace(reqs=[STREAM]))
