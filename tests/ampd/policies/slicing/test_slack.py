"""Our slicing: exact examples of its rules, and batches that are carried through its passes step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ampd.perf.model import PerformanceModel, joined_tokens
from ampd.perf.presets import load_performance_model
from ampd.policies.base import SlicingSituation
from ampd.policies.slicing.slack import SlackSlicing, most_tokens
from ampd.types import Parallelism, PrefillTask, RunningRound, Slo
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PLAIN, SLO, Mixing, round_of

MIXING = load_performance_model("qwen3-32b-h20")
REAL = load_performance_model("qwen3-32b-h20", "an engine whose passes were not measured")
TP4 = Parallelism(4)
PAGE_TOKENS = 16
EXACT = situations.with_constants(SlackSlicing(), ITL_SHARE=1.0, LEAST_PASSES=1.0, AHEAD_TOKENS=0.0)
untimed = settings(deadline=None)


def cut(
    incr: int,
    *running: RunningRound,
    policy: SlackSlicing = EXACT,
    hist: int = 0,
    slo: Slo = SLO,
    model: PerformanceModel = PLAIN,
) -> int:
    return situations.slice(policy, round_of(hist, incr, slo), running, TP4, model, 0.0)


def alone(model: PerformanceModel, hist: int, incr: int) -> SlicingSituation:
    """A prefill on a worker that decodes nothing."""
    return SlicingSituation(task=round_of(hist, incr), running=(), parallelism=TP4, model=model, now_s=0.0)


def running(tokens: int, elapsed_s: float, itl_slo_s: float = 0.04) -> RunningRound:
    return RunningRound(tokens, elapsed_s, itl_slo_s, 100)


# -- what the batch can pay

# `PLAIN`: a pass takes 10 ms and 1 ms a token, the shortest (a page) 26 ms; a step of one sequence takes 6 ms, so that
# 34 ms of each target are spare.


def test_what_a_round_has_saved_is_spent() -> None:
    # 5 tokens in 134 ms of 200: 66 less a step of 6: 60 ms are a pass of 50 tokens (to a page's precision).
    assert 50 - PAGE_TOKENS < cut(400, running(5, 0.134)) <= 50
    # Nothing was saved by a round that is on its target to the end of the next step: it gains 34 ms a step.
    assert cut(400, running(5, 0.194)) == 0


def test_the_poorest_round_counts() -> None:
    rich, poor = running(50, 0.3), running(5, 0.1)
    # A step of two takes 7 ms: 200 - 100 - 7 = 93 ms.
    assert cut(400, rich, poor) == cut(400, poor, rich)
    assert 83 - PAGE_TOKENS < cut(400, rich, poor) <= 83


def test_a_round_with_another_target_pays_by_its_own() -> None:
    assert 83 - PAGE_TOKENS < cut(400, running(5, 0.1), running(2, 0.1, 0.1)) <= 83


def test_tokens_to_come_are_counted_on_as_far_as_they_are_expected() -> None:
    ahead = situations.with_constants(EXACT, AHEAD_TOKENS=2.0)
    # 60 ms now, and 34 more with each of two further tokens.
    assert 118 - PAGE_TOKENS < cut(400, running(5, 0.134), policy=ahead) <= 118


def test_only_a_share_of_the_target_is_used_up() -> None:
    share = situations.with_constants(EXACT, ITL_SHARE=0.9)
    # 5 * 36 - 94 - 6 = 80 ms.
    assert 70 - PAGE_TOKENS < cut(400, running(5, 0.094), policy=share) <= 70


def test_all_that_is_left_if_it_fits() -> None:
    assert cut(50, running(5, 0.133)) == 50
    assert cut(5, running(5, 0.133)) == 5


# -- steps alone


def test_a_batch_that_cannot_pay_the_least_pass_decodes() -> None:
    # The least pass takes 26 ms. 5 tokens in 168 ms of 200, and a step of 6 before they are over.
    assert cut(400, running(5, 0.168)) > 0
    assert cut(400, running(5, 0.169)) == 0
    more = situations.with_constants(EXACT, LEAST_PASSES=2.0)
    assert cut(400, running(5, 0.142), policy=more) > 0
    assert cut(400, running(5, 0.143), policy=more) == 0


def test_a_short_rest_needs_no_more_than_itself() -> None:
    # 12 ms for two tokens are there.
    assert cut(2, running(5, 0.182)) == 2
    assert cut(2, running(5, 0.183)) == 0


def test_one_that_has_waited_for_long_enough_waits_no_more() -> None:
    """The least slice, whatever the batch: with rounds that keep joining nobody would ever pay."""
    poor = running(5, 0.194)
    task, policy = round_of(0, 400, Slo(1.0, 0.04)), situations.with_constants(EXACT, MOST_WAIT_TARGETS=3.0)
    for now_s, waits in ((0.0, True), (2.9, True), (3.1, False)):
        chosen = situations.slice(policy, task, (poor,), TP4, PLAIN, now_s)
        assert (chosen == 0) is waits
        assert waits or 1 <= chosen <= 16


def test_a_prefill_waits_less_for_rounds_with_tighter_targets_than_its_own() -> None:
    tight, plain = running(5, 0.19, 0.0061), running(5, 0.134)
    task = round_of(0, 400, Slo(1.0, 0.04))
    policy = situations.with_constants(EXACT, LOST_TOKENS=10_000)
    for now_s, waits in ((0.2, True), (0.3, False)):
        assert (situations.slice(policy, task, (tight,), TP4, PLAIN, now_s) == 0) is waits
    # A step of two takes 7 ms: 5 * 40 - 134 - 7 = 59 ms, as if only the other one was there.
    chosen = situations.slice(policy, task, (tight, plain), TP4, PLAIN, 0.3)
    assert 49 - PAGE_TOKENS < chosen <= 49


def test_the_wait_is_bounded_in_seconds_too() -> None:
    task, poor = round_of(0, 400, Slo(1000.0, 0.04)), running(5, 0.194)
    for now_s, waits in ((59.9, True), (60.1, False)):
        assert (situations.slice(EXACT, task, (poor,), TP4, PLAIN, now_s) == 0) is waits


# -- lost rounds


def test_a_round_that_cannot_catch_up_is_not_waited_for() -> None:
    # A debt of more than 64 times 34 ms.
    lost = running(5, 0.194 + 64.5 * 0.034)
    assert cut(400, lost) == cut(400) == 400
    assert cut(400, running(5, 0.194 + 63.5 * 0.034)) == 0
    few = situations.with_constants(EXACT, LOST_TOKENS=2)
    assert cut(400, running(5, 0.194 + 2.5 * 0.034), policy=few) == 400


def test_a_round_whose_target_a_step_alone_exceeds_is_not_waited_for() -> None:
    assert cut(400, running(9, 0.1, 0.006)) == 400
    assert cut(400, running(50, 0.0, 0.005)) == 400, "however much it has saved"
    assert cut(400, running(9, 0.1, 0.005), running(5, 0.133)) < 60, "the other one still counts"


@untimed
@given(st.integers(0, 40_000), st.integers(1, 20_000), st.floats(0, 2))
def test_most_tokens_is_the_most_to_a_pages_precision(hist: int, incr: int, seconds: float) -> None:
    assume(REAL.prefill_s(hist, incr, TP4) > seconds)
    tokens = most_tokens(alone(REAL, hist, incr), seconds)
    assert 1 <= tokens <= incr
    if tokens > 1:
        assert REAL.prefill_s(hist, tokens, TP4) <= seconds
    if tokens + PAGE_TOKENS <= incr:
        assert REAL.prefill_s(hist, tokens + PAGE_TOKENS, TP4) > seconds


# -- a batch, step by step


@dataclass
class Decoding:
    """A round of the modelled batch: when its first token came, its tokens so far and in the end."""

    first_s: float
    tokens: int
    end_tokens: int
    itl_slo_s: float
    context_tokens: int
    mean_s: float = 0.0

    def view(self, now_s: float) -> RunningRound:
        return RunningRound(self.tokens, now_s - self.first_s, self.itl_slo_s, self.context_tokens + self.tokens)


@dataclass
class Station:
    """A decode worker: prefills pause the batch, and a step follows each of them."""

    policy: SlackSlicing
    model: PerformanceModel
    batch: list[Decoding]
    now_s: float = 0.0
    joins: Callable[[float], Iterable[Decoding]] = lambda _: ()
    slices: int = 0

    def step(self) -> None:
        if not self.batch:
            return
        context_tokens = sum(decoding.context_tokens + decoding.tokens for decoding in self.batch)
        self.now_s += self.model.decode_step_s(len(self.batch), context_tokens, TP4)
        for decoding in self.batch:
            decoding.tokens += 1
            decoding.mean_s = (self.now_s - decoding.first_s) / (decoding.tokens - 1)
        self.batch = [decoding for decoding in self.batch if decoding.tokens < decoding.end_tokens]
        self.batch += self.joins(self.now_s)

    def prefill(self, task: PrefillTask, most_s: float = inf) -> None:
        """Ask, do, and decode one step between two slices, until the prefill is done."""
        begun_s = self.now_s
        while task.incr_tokens:
            assert self.now_s - begun_s <= most_s, "it never ends"
            chosen = situations.slice(
                self.policy, task, [decoding.view(self.now_s) for decoding in self.batch], TP4, self.model, self.now_s
            )
            assert 0 <= chosen <= task.incr_tokens
            assert chosen or self.batch, "there is no round to wait for"
            if chosen:
                self.now_s += self.model.prefill_s(task.hist_tokens, chosen, TP4)
                self.slices += 1
                task = task.with_tokens(task.hist_tokens + chosen, task.incr_tokens - chosen)
            self.step()


@st.composite
def rounds_on_target(draw: st.DrawFn, step_s: float, share: float, most: int) -> list[Decoding]:
    """Rounds whose next token, after a step, is in time by `share` of their target."""
    batch = []
    for _ in range(draw(st.integers(1, most))):
        itl_s = draw(st.sampled_from([0.04, 0.06, 0.1]))
        tokens = draw(st.integers(1, 200))
        elapsed_s = draw(st.floats(0, 1)) * max(share * itl_s * tokens - step_s, 0.0)
        batch.append(
            Decoding(-elapsed_s, tokens, tokens + draw(st.integers(1, 300)), itl_s, draw(st.integers(1, 8000)))
        )
    return batch


@st.composite
def stations(draw: st.DrawFn, ahead_tokens: float) -> tuple[Station, PrefillTask]:
    policy = situations.with_constants(
        SlackSlicing(),
        ITL_SHARE=draw(st.sampled_from([0.8, 0.92, 1.0])),
        LEAST_PASSES=draw(st.sampled_from([1.0, 2.0, 3.0])),
        AHEAD_TOKENS=ahead_tokens,
    )
    slowest_s = REAL.decode_step_s(24, 24 * 9000, TP4)
    batch = draw(rounds_on_target(slowest_s, policy.ITL_SHARE, 24))
    task = round_of(draw(st.integers(0, 30_000)), draw(st.integers(1, 9000)))
    return Station(policy, REAL, batch), task


@untimed
@given(stations(0.0))
def test_no_running_round_misses_its_target_by_a_prefill(case: tuple[Station, PrefillTask]) -> None:
    """Also not one that ends with its next token: nothing is counted on."""
    station, task = case
    rounds = list(station.batch)
    station.prefill(task)
    for decoding in rounds:
        if decoding.mean_s:
            assert decoding.mean_s <= station.policy.ITL_SHARE * decoding.itl_slo_s * (1 + 1e-9)


@untimed
@given(stations(1.0))
def test_a_round_with_the_tokens_left_that_are_counted_on_keeps_its_target(case: tuple[Station, PrefillTask]) -> None:
    """No slice comes in its last two tokens: the first is paid for by the second."""
    station, task = case
    rounds = list(station.batch)
    for decoding in rounds:
        decoding.end_tokens += 1_000_000
    station.prefill(task)
    for decoding in rounds:
        decoding.end_tokens = decoding.tokens + 1
    station.step()
    for decoding in rounds:
        # Steps grow by the batch's new tokens, which nobody can know before.
        assert decoding.mean_s <= station.policy.ITL_SHARE * decoding.itl_slo_s * (1 + 1e-4)


@untimed
@given(stations(1.0))
def test_a_round_that_ends_right_after_a_slice_owes_one_steps_gain_at_most(case: tuple[Station, PrefillTask]) -> None:
    station, task = case
    rounds = list(station.batch)
    station.prefill(task)
    for decoding in rounds:
        if decoding.mean_s:
            target_s = station.policy.ITL_SHARE * decoding.itl_slo_s
            assert decoding.mean_s * (decoding.tokens - 1) <= target_s * decoding.tokens * (1 + 1e-4)


@pytest.mark.slow
@untimed
@given(stations(1.0), st.integers(0, 3))
def test_slices_and_waits_end_whatever_the_batch(case: tuple[Station, PrefillTask], debts: int) -> None:
    station, task = case
    for decoding in station.batch[:debts]:
        decoding.first_s -= 10.0
    for decoding in station.batch:
        decoding.end_tokens = 1_000_000
    station.prefill(task, most_s=60.0)
    needed = task.incr_tokens / max(1, most_tokens(alone(REAL, 40_000, 9000), REAL.prefill_s(0, 1, TP4)))
    assert station.slices <= needed + 9000 / PAGE_TOKENS


@untimed
@example(batch=[running(1, 0.0, 0.01953125)], hist=0, incr=110, ttft_s=1.0)
@given(
    st.lists(st.builds(running, st.integers(1, 500), st.floats(0, 30), st.floats(0.001, 0.2)), max_size=40),
    st.integers(0, 40_000),
    st.integers(1, 20_000),
    st.floats(0.05, 10),
)
def test_every_answer_is_valid(batch: list[RunningRound], hist: int, incr: int, ttft_s: float) -> None:
    policy, task = SlackSlicing(), round_of(hist, incr, Slo(ttft_s, 0.04))
    for model in (REAL, MIXING):
        chosen = situations.slice(policy, task, batch, TP4, model, 0.0)
        assert (0 if batch else incr) <= chosen <= incr
        assert chosen == situations.slice(policy, task, batch[::-1], TP4, model, 0.0)
        if chosen:
            # One that has waited no longer minds rounds with a tighter ITL target than its own, and is else cut as
            # before.
            late = situations.slice(policy, task, batch, TP4, model, 10.0)
            assert late == chosen or (late > chosen and any(decoding.itl_slo_s < 0.04 for decoding in batch))


@pytest.mark.parametrize(("every", "context_tokens"), [(1, 16_000), (1, 8000), (2, 2000), (8, 2000)])
def test_rounds_that_keep_joining_do_not_starve_a_prefill(every: int, context_tokens: int) -> None:
    """None of them has saved anything yet; in the first case steps take nine tenths of the target."""
    steps = 0

    def joins(now_s: float) -> Iterable[Decoding]:
        nonlocal steps
        steps += 1
        return [Decoding(now_s, 1, 60, 0.04, context_tokens)] if steps % every == 0 else []

    batch = [Decoding(-0.0369 * number, 1 + number, 60, 0.04, context_tokens) for number in range(0, 60, every)]
    station = Station(SlackSlicing(), REAL, batch, joins=joins)
    station.prefill(round_of(2000, 3000), most_s=30.0)


# -- mixed passes


def test_a_mixed_pass_saves_what_the_step_reads() -> None:
    # 66 ms are left, less a step of 6, which the pass saves where it reads the weights: a pass of 56 tokens.
    assert 56 - PAGE_TOKENS < cut(400, running(5, 0.134), model=Mixing()) <= 56
    assert cut(50, running(5, 0.134), model=Mixing()) == 50
    assert 53 - PAGE_TOKENS < cut(400, running(5, 0.134), model=Mixing(0.5)) <= 53


def test_a_mixed_pass_counts_on_no_further_token() -> None:
    far = situations.with_constants(EXACT, AHEAD_TOKENS=9.0)
    assert cut(400, running(5, 0.134), policy=far, model=Mixing()) == cut(400, running(5, 0.134), model=Mixing())


def test_a_mixed_pass_may_be_short_but_needs_some_budget() -> None:
    # The shortest pass takes 26 ms.
    assert 1 <= cut(400, running(5, 0.194), model=Mixing()) <= PAGE_TOKENS
    assert cut(400, running(5, 0.1959), model=Mixing()) == 1
    assert cut(400, running(5, 0.1975), model=Mixing()) == 0
    assert cut(400, running(5, 9.0), model=Mixing()) == 400, "nothing saves this round"


@pytest.mark.parametrize("dear", [Mixing(0.0), Mixing(1.0, 1e-3)], ids=["saves nothing", "long contexts"])
def test_where_mixed_passes_do_not_pay_the_batch_pauses(dear: Mixing) -> None:
    for batch in ((running(5, 0.134),), (running(5, 0.168),), (running(5, 0.169),), (running(5, 0.194),)):
        assert cut(400, *batch, model=dear) == cut(400, *batch)
    assert cut(400, running(5, 0.194), model=Mixing(1.0, 1e-6)) > 0, "a cheap context"


@untimed
@given(stations(0.0))
def test_no_running_round_misses_its_target_by_mixed_passes(case: tuple[Station, PrefillTask]) -> None:
    """But for the time that the batch's own tokens take in a pass, which a share below 1 leaves room for."""
    station, task = case
    policy = situations.with_constants(station.policy, LEAST_BESIDE_PASSES=1.0)
    rounds, rows, own_s = list(station.batch), len(station.batch), 0.0
    while task.incr_tokens:
        seen = [decoding.view(station.now_s) for decoding in station.batch]
        chosen = situations.slice(policy, task, seen, TP4, MIXING, station.now_s)
        if chosen:
            parts, context_tokens = [(task.hist_tokens, chosen)], sum(each.context_tokens for each in seen)
            with_rows_s = MIXING.prefill_s(*joined_tokens([*parts, (0, rows)]), TP4)
            own_s = max(own_s, with_rows_s - MIXING.prefill_s(*parts[0], TP4))
            step_s = MIXING.decode_step_s(rows, context_tokens, TP4)
            station.now_s += MIXING.mixed_pass_s(parts, rows, context_tokens, TP4) - step_s
            task = task.with_tokens(task.hist_tokens + chosen, task.incr_tokens - chosen)
        station.step()
        rows = len(station.batch)
    for decoding in rounds:
        if decoding.mean_s:
            assert decoding.mean_s <= station.policy.ITL_SHARE * decoding.itl_slo_s + own_s
