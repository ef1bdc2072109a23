"""Prefills beside decode steps, in one pass or on parts of the GPU, and prompts that two workers prefill."""

from dataclasses import dataclass, replace

import pytest

from ampd.policies.base import Compute, RoutingSituation, SlicingSituation
from ampd.types import Parallelism, Route, RouteDecision
from planner.simulator.cluster import Cluster
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.steps import EngineTimes

from .lab import LOCAL, MODEL, REMOTE, run, session, single

TP1 = Parallelism(1)
TIMES = EngineTimes(MODEL, TP1)


@dataclass
class Cut:
    """Slices of `tokens`, beside the batch's steps on a share of the GPU."""

    tokens: int
    decode_share: float | None
    is_whole: bool = False
    shares_passes: bool = False

    def slice(self, situation: SlicingSituation) -> Compute:
        return Compute(min(self.tokens, situation.task.incr_tokens), self.decode_share)

    def turn(self, situation: SlicingSituation) -> int:
        return situation.task.incr_tokens


@dataclass
class SplitAt:
    """Prefills go to the first prefill worker up to a token."""

    tokens: int

    def route(self, situation: RoutingSituation) -> RouteDecision:
        worker = situation.prefill[0]
        return RouteDecision(Route.REMOTE, worker.worker_id, "split", split_tokens=self.tokens)


def cut(tokens: int, decode_share: float | None) -> Policies:
    return replace(LOCAL, slicing=Cut(tokens, decode_share))


TALK_AND_PROMPT = [session("talks", (160, 200)), session("reads", (4096, 2), arrival_s=0.3)]


def longest_gap_s(policies: Policies) -> float:
    return max(gap.first_s for gap in run(TALK_AND_PROMPT, single(prefill=0), policies).gaps)


@pytest.mark.parametrize("decode_share", [0.0, 0.25])
def test_a_slice_and_a_step_take_the_time_of_one_pass(decode_share: float) -> None:
    pass_s = TIMES.mixed_pass_s([(4096 - 512, 512)], 1, 250, decode_share)
    assert longest_gap_s(cut(512, decode_share)) == pytest.approx(pass_s, rel=0.01)
    pause_s = MODEL.prefill_s(4096 - 512, 512, TP1) + MODEL.decode_step_s(1, 250, TP1)
    assert longest_gap_s(cut(512, None)) == pytest.approx(pause_s, rel=0.01)


def test_the_steps_of_a_batch_are_in_the_passes_of_a_policy_that_shares_them() -> None:
    policies = replace(LOCAL, slicing=Cut(512, None, shares_passes=True))
    pass_s = TIMES.mixed_pass_s([(4096 - 512, 512)], 1, 250)
    assert longest_gap_s(policies) == pytest.approx(pass_s, rel=0.01)


@pytest.mark.parametrize("shares_passes", [False, True])
def test_slices_that_share_a_pass_with_a_step_follow_each_other(shares_passes: bool) -> None:
    policies = replace(LOCAL, slicing=Cut(512, None if shares_passes else 0.0, shares_passes=shares_passes))
    done = run(TALK_AND_PROMPT, single(prefill=0), policies, SimulationOptions(keeps_timeline=True))
    ends = [span.end_s for span in done.timeline if span.detail.get("session") == "reads" and span.kind == "prefill"]
    begins = [
        span.start_s for span in done.timeline if span.detail.get("session") == "reads" and span.kind == "prefill"
    ]
    assert len(ends) == 8
    assert begins[1:] == ends[:-1], "no step of the batch alone in between"


def test_a_decode_step_beside_a_prefill_is_slower_only_below_a_third_of_the_gpu() -> None:
    step_s = MODEL.decode_step_s(8, 8000, TP1)
    short = [(0, 1)]
    assert TIMES.mixed_pass_s(short, 8, 8000, 0.1) == pytest.approx(step_s / 0.3)
    assert TIMES.mixed_pass_s([(0, 4000)], 8, 8000, 0.5) == pytest.approx(2 * MODEL.prefill_s(0, 4000, TP1))


def test_a_split_prompt_is_computed_by_both_workers_and_moved_once() -> None:
    how = SimulationOptions(keeps_timeline=True)
    done = run([session("a", (2048, 5))], single(), replace(REMOTE, routing=SplitAt(1280)), how)
    spans = [span for span in done.timeline if span.kind in ("prefill", "kv-increment")]
    assert [(span.worker_id, span.detail["tokens"]) for span in spans] == [
        ("prefill-0", 1280),
        ("decode-0", 1280),
        ("decode-0", 768),
    ]
    (record,) = done.rounds
    assert record.ttft_s == pytest.approx(
        MODEL.prefill_s(0, 1280, TP1) + MODEL.kv_transfer_s(1280, TP1, TP1) + MODEL.prefill_s(1280, 768, TP1)
    )


@pytest.mark.parametrize("tokens", [0, 2048, 5000])
def test_a_split_outside_of_the_increment_is_none(tokens: int) -> None:
    cluster: Cluster = single()
    split = run([session("a", (2048, 5))], cluster, replace(REMOTE, routing=SplitAt(tokens)))
    whole = run([session("a", (2048, 5))], cluster, REMOTE)
    assert [record.ttft_s for record in split.rounds] == [record.ttft_s for record in whole.rounds]


def test_later_rounds_of_a_split_session_find_their_history_at_the_owner() -> None:
    rounds = (2048, 5), (512, 5), (512, 5)
    done = run([session("a", *rounds)], single(), replace(REMOTE, routing=SplitAt(2300)))
    assert [record.error for record in done.rounds] == [None] * 3
    assert all(record.prefill.missing_tokens == 0 for record in done.rounds)
