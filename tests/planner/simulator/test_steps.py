"""Macro-steps against stepping token by token: the simulator's own, and an oracle that shares no code with it."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism
from planner.simulator.decode_batch import steps_s, steps_within
from planner.simulator.options import Cluster, Policies, SimulationOptions
from planner.simulator.outcome import gap_percentiles
from workloads.trace import Session, kept_tokens

from .lab import APART, LOCAL, clusters, options, policies, run, session_lists, single, steps_at_once

relaxed = settings(max_examples=40, suppress_health_check=list(HealthCheck))
PAGE = 16


@pytest.mark.slow
@relaxed
@given(session_lists(), clusters, policies, options)
def test_macro_steps_equal_single_steps(
    sessions: list[Session], cluster: Cluster, chosen: Policies, how: SimulationOptions
) -> None:
    at_once = run(sessions, cluster, chosen, how)
    with steps_at_once(1):
        one_by_one = run(sessions, cluster, chosen, how)
    assert len(at_once.rounds) == len(one_by_one.rounds)
    others = {(record.session_id, record.index): record for record in one_by_one.rounds}
    for record in at_once.rounds:
        other = others[record.session_id, record.index]
        for name in ("route", "reason", "worker_id", "decode_worker_id", "error"):
            assert getattr(record, name) == getattr(other, name)
        for name in ("sent_s", "ttft_s", "itl_s", "e2e_s"):
            ours, theirs = getattr(record, name), getattr(other, name)
            assert ours == theirs or ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)
    many, single_steps = gap_percentiles(at_once.gaps), gap_percentiles(one_by_one.gaps)
    for name, value in many.items():
        assert value == single_steps[name] or value == pytest.approx(single_steps[name], rel=1e-6, abs=1e-12)


# -- the oracle


@dataclass
class Sequence:
    session: int
    index: int
    context: int
    left: int
    first_s: float


def oracle(sessions: list[Session], model: PerformanceModel, theta: Parallelism) -> dict[tuple[str, int], list[float]]:
    """One co-located worker with unlimited memory, first come first served, step by step: (sent, TTFT, end to end).

    The next prefill enters the engine when the one before it is out, so the batch has a step in between.
    """
    now_s = 0.0
    has_stepped = True
    ready = [(each.arrival_s, number, 0) for number, each in enumerate(sessions)]
    contexts = [0] * len(sessions)
    batch: list[Sequence] = []
    times: dict[tuple[str, int], list[float]] = {}

    def finish(session: int, index: int, first_s: float) -> None:
        name = sessions[session].session_id
        sent_s = times[name, index][0]
        times[name, index] += [first_s - sent_s, now_s - sent_s]
        if index + 1 < len(sessions[session].rounds):
            sent_s = now_s + sessions[session].rounds[index + 1].tool_s
            _assume_no_tie(ready, sent_s)
            ready.append((sent_s, session, index + 1))

    while ready or batch:
        waiting = sorted(each for each in ready if each[0] <= now_s)
        if waiting and (has_stepped or not batch):
            has_stepped = False
            sent_s, session, index = waiting[0]
            ready.remove(waiting[0])
            item = sessions[session].rounds[index]
            kept = kept_tokens(item, contexts[session])
            # Whole pages of what has KV, which the last token of a context has not.
            cached = min(kept, max(contexts[session] - 1, 0)) // PAGE * PAGE
            cached = min(cached, (kept + item.incr_tokens - 1) // PAGE * PAGE)
            now_s += model.prefill_s(cached, kept + item.incr_tokens - cached, theta)
            _assume_no_tie(ready, now_s)
            times[sessions[session].session_id, index] = [sent_s]
            contexts[session] = kept + item.incr_tokens + item.output_tokens
            if item.output_tokens == 1:
                finish(session, index, now_s)
            else:
                batch.append(Sequence(session, index, kept + item.incr_tokens + 1, item.output_tokens - 1, now_s))
        elif batch:
            has_stepped = True
            now_s += model.decode_step_s(len(batch), sum(each.context for each in batch), theta)
            _assume_no_tie(ready, now_s)
            for each in batch:
                each.context += 1
                each.left -= 1
            for each in [each for each in batch if not each.left]:
                finish(each.session, each.index, each.first_s)
            batch = [each for each in batch if each.left]
        else:
            now_s = min(ready)[0]
    return times


def _assume_no_tie(ready: list[tuple[float, int, int]], now_s: float) -> None:
    """Nobody comes in the very moment in which a pass ends or another comes: who is first is open then."""
    assume(all(abs(at_s - now_s) > 1e-9 for at_s, _, _ in ready))


@relaxed
@given(session_lists(most=6, least_tool_s=0.001), st.sampled_from([1, 2, 4]))
def test_a_colocated_worker_equals_the_oracle(sessions: list[Session], tp: int) -> None:
    done = run(sessions, single(tp, prefill=0), LOCAL, model=APART)
    expected = oracle(sessions, APART, Parallelism(tp))
    assert {(record.session_id, record.index) for record in done.rounds} == set(expected)
    for record in done.rounds:
        sent_s, ttft_s, e2e_s = expected[record.session_id, record.index]
        assert record.sent_s == pytest.approx(sent_s, rel=1e-9)
        assert record.ttft_s == pytest.approx(ttft_s, rel=1e-9)
        assert record.e2e_s == pytest.approx(e2e_s, rel=1e-9)


# -- the arithmetic


@settings(deadline=None)
@given(st.floats(1e-4, 1.0), st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)), st.floats(0, 50))
def test_steps_within_is_the_inverse_of_their_duration(first_s: float, growth_s: float, elapsed_s: float) -> None:
    steps = steps_within(first_s, growth_s, elapsed_s)
    assert steps_s(first_s, growth_s, steps) <= elapsed_s
    assert steps_s(first_s, growth_s, steps + 1) > elapsed_s
    naive_s = 0.0
    for step in range(steps):
        naive_s += first_s + step * growth_s
    assert steps_s(first_s, growth_s, steps) == pytest.approx(naive_s, rel=1e-9, abs=1e-12)
