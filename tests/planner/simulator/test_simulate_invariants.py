"""What holds of every run: each round once, causes before effects, KV conserved, same seed same result."""

import subprocess
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampd.policies.slicing.whole import WholeSlicing
from ampd.types import Parallelism
from planner.simulator.cluster import Cluster
from planner.simulator.events import EventLoop
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.steps import steps_s
from workloads.trace import Session

from .lab import AMPD, DICE, MODEL, clusters, options, policies, run, session_lists, watched_memories

relaxed = settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))


@relaxed
@given(session_lists(), st.one_of(clusters(), clusters(tight=True)), policies, options)
def test_every_round_ends_exactly_once(
    sessions: list[Session], cluster: Cluster, chosen: Policies, how: SimulationOptions
) -> None:
    done = run(sessions, cluster, chosen, how)
    ended: dict[str, list[Any]] = defaultdict(list)
    for record in done.rounds:
        ended[record.session_id].append(record)
    assert set(ended) == {session.session_id for session in sessions}
    for session in sessions:
        rounds = ended[session.session_id]
        assert [record.index for record in rounds] == list(range(len(rounds)))
        failed = [record for record in rounds if record.error]
        if failed:
            assert failed == rounds[-1:], "an error ends its session"
        else:
            assert len(rounds) == len(session.rounds)
        for record, item in zip(rounds, session.rounds, strict=False):
            assert record.output_tokens == item.output_tokens
            assert record.incr_tokens == item.incr_tokens


@relaxed
@given(session_lists(), st.one_of(clusters(), clusters(tight=True)), policies, options)
def test_no_effect_comes_before_its_cause(
    sessions: list[Session], cluster: Cluster, chosen: Policies, how: SimulationOptions
) -> None:
    done = run(sessions, cluster, chosen, how)
    planned = {session.session_id: session for session in sessions}
    before: dict[str, float] = {session.session_id: session.arrival_s for session in sessions}
    for record in done.rounds:
        tool_s = planned[record.session_id].rounds[record.index].tool_s
        assert record.sent_s == pytest.approx(before[record.session_id] + tool_s, abs=1e-9)
        if record.error:
            continue
        assert record.ttft_s is not None
        assert record.e2e_s is not None
        assert record.ttft_s >= how.dispatch_s + record.queued_s - 1e-9
        assert record.e2e_s >= record.ttft_s - 1e-12
        assert record.queued_s >= 0
        assert (record.itl_s is None) == (record.output_tokens == 1)
        theta = _parallelism(cluster, record.decode_worker_id)
        token_s = min(MODEL.decode_step_s(1, 0, theta), MODEL.prefill_s(0, 1, theta))
        assert record.e2e_s - record.ttft_s >= (record.output_tokens - 1) * token_s - 1e-9
        before[record.session_id] = record.sent_s + record.e2e_s


@relaxed
@given(session_lists(), st.one_of(clusters(), clusters(tight=True)), policies, options)
def test_a_first_token_needs_all_that_is_new_computed_after_its_turn_in_the_queue(
    sessions: list[Session], cluster: Cluster, chosen: Policies, how: SimulationOptions
) -> None:
    with watched_memories() as memories:
        done = run(sessions, cluster, chosen, how)
    evicted = {session_id for memory in memories for session_id in memory.evicted_sessions}
    prefills = [span for span in done.timeline if span.kind == "prefill"]
    passes = Counter((span.worker_id, span.start_s) for span in prefills)
    for record in done.rounds:
        if record.error:
            continue
        assert record.ttft_s is not None
        turn_s, first_s = record.sent_s + how.dispatch_s + record.queued_s, record.sent_s + record.ttft_s
        mine = [
            span
            for span in prefills
            if (span.worker_id, span.detail["session"]) == (record.worker_id, record.session_id)
            and turn_s - 1e-9 <= span.start_s
            and span.end_s <= first_s + 1e-9
        ]
        prompt_tokens = record.hist_tokens + record.incr_tokens
        computed_tokens = sum(span.detail["tokens"] for span in mine)
        assert record.incr_tokens <= computed_tokens
        # A full memory in which no round runs evicts the slices of a prefill that waits. They are computed again.
        lost_slices = computed_tokens > prompt_tokens
        if lost_slices:
            assert record.session_id in evicted
            assert not isinstance(chosen.slicing, WholeSlicing)
        assert mine[-1].end_s == pytest.approx(first_s)
        alone = all(passes[span.worker_id, span.start_s] == 1 for span in mine)
        if alone and not how.chunk_tokens and not lost_slices:
            assert len(mine) == 1 or not isinstance(chosen.slicing, WholeSlicing)
            theta = _parallelism(cluster, record.worker_id)
            behind_tokens = prompt_tokens - computed_tokens
            for span in mine:
                seconds = MODEL.prefill_s(behind_tokens, span.detail["tokens"], theta)
                assert span.end_s - span.start_s == pytest.approx(seconds)
                behind_tokens += span.detail["tokens"]
            if record.route == "remote":
                assert record.kv_history_tokens <= prompt_tokens - computed_tokens


@relaxed
@given(session_lists(), st.one_of(clusters(), clusters(tight=True)), policies, options)
def test_the_gaps_between_tokens_are_the_time_between_first_and_last_tokens(
    sessions: list[Session], cluster: Cluster, chosen: Policies, how: SimulationOptions
) -> None:
    done = run(sessions, cluster, chosen, how)
    served = [record for record in done.rounds if record.e2e_s is not None and record.ttft_s is not None]
    assert sum(gap.steps * gap.batch for gap in done.gaps) == sum(each.output_tokens - 1 for each in served)
    gaps_s = sum(steps_s(gap.first_s, gap.growth_s, gap.steps) * gap.batch for gap in done.gaps)
    assert gaps_s == pytest.approx(sum((each.e2e_s or 0.0) - (each.ttft_s or 0.0) for each in served), abs=1e-6)


@relaxed
@given(session_lists(), st.one_of(clusters(), clusters(tight=True)), policies, options)
def test_a_run_lasts_until_its_last_token(
    sessions: list[Session], cluster: Cluster, chosen: Policies, how: SimulationOptions
) -> None:
    done = run(sessions, cluster, chosen, how)
    assert done.duration_s == max(
        [0.0, *(record.sent_s + record.e2e_s for record in done.rounds if record.e2e_s is not None)]
    )


@relaxed
@given(session_lists(), clusters(), policies, options)
def test_a_worker_computes_one_thing_at_a_time(
    sessions: list[Session], cluster: Cluster, chosen: Policies, how: SimulationOptions
) -> None:
    done = run(sessions, cluster, chosen, how)
    lanes: dict[str, set[tuple[float, float]]] = defaultdict(set)
    for span in done.timeline:
        assert span.start_s <= span.end_s
        if span.lane == "compute":
            lanes[span.worker_id].add((span.start_s, span.end_s))  # a pass over several prefills is one
    for spans in lanes.values():
        ordered = sorted(spans)
        for (_, end_s), (start_s, _) in pairwise(ordered):
            assert start_s >= end_s - 1e-9


@relaxed
@given(session_lists(), clusters(), options)
def test_a_remote_round_reads_computes_returns_and_decodes_in_this_order(
    sessions: list[Session], cluster: Cluster, how: SimulationOptions
) -> None:
    done = run(sessions, cluster, DICE, how)
    spans = defaultdict(list)
    for span in done.timeline:
        spans[span.kind, span.detail.get("session")].append(span)
    for record in done.rounds:
        if record.error or record.route != "remote":
            continue
        assert record.ttft_s is not None
        first_s = record.sent_s + record.ttft_s
        if record.kv_history_tokens:
            assert any(
                record.sent_s <= span.start_s and span.end_s <= first_s + 1e-9
                for span in spans["kv-history", record.session_id]
                if span.worker_id == record.worker_id
            )
        assert any(
            abs(span.end_s - first_s) < 1e-9 and span.worker_id == record.worker_id
            for span in spans["prefill", record.session_id]
        )
        if record.output_tokens > 1 and record.kv_increment_tokens:
            arrived = [
                span.end_s
                for span in spans["kv-increment", record.session_id]
                if span.worker_id == record.decode_worker_id and span.start_s >= first_s + how.hand_over_s - 1e-9
            ]
            assert arrived
            assert record.e2e_s is not None
            theta = _parallelism(cluster, record.decode_worker_id)
            token_s = min(MODEL.decode_step_s(1, 0, theta), MODEL.prefill_s(0, 1, theta))
            assert record.sent_s + record.e2e_s >= min(arrived) + (record.output_tokens - 1) * token_s - 1e-9


@relaxed
@given(session_lists(), st.one_of(clusters(), clusters(tight=True)), policies, options)
def test_kv_is_conserved_never_exceeds_the_memory_and_is_gone_at_the_end(
    sessions: list[Session], cluster: Cluster, chosen: Policies, how: SimulationOptions
) -> None:
    with watched_memories() as memories:
        run(sessions, cluster, chosen, how)
    assert memories
    for memory in memories:
        assert memory.used_tokens == 0, "all sessions have ended"
        assert not memory.held
        assert not memory._keepers


@relaxed
@given(session_lists(), clusters(), policies, options)
def test_the_same_seed_gives_the_same_result(
    sessions: list[Session], cluster: Cluster, chosen: Policies, how: SimulationOptions
) -> None:
    each, other = (run(sessions, cluster, chosen, how) for _ in range(2))
    assert each.rounds == other.rounds
    assert each.gaps == other.gaps
    assert each.timeline == other.timeline


def test_the_same_seed_gives_the_same_result_in_another_process() -> None:
    """Hashes of strings differ from process to process; results must not."""
    script = (
        "from ampd.cli.main import main; main(['simulate', 'tau-bench-airline', '--model', 'llama-3.1-8b', '--gpu', "
        "'h20', '--prefill', '2xTP1', '--decode', '2xTP1', '--rate', '20', '--limit', '60', "
        "'--kv-capacity-tokens', '9000', '--coordinators', '3', '--state-delay-s', '0.1', '--pools', 'static,arrow', "
        "'--ttft', '0.2', '--json'])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]


def test_nothing_happens_in_the_past() -> None:
    loop = EventLoop()
    seen: list[str] = []
    loop.at(2.0, lambda _: loop.at(1.0, seen.append, "too late"))
    with pytest.raises(ValueError, match="any more"):
        loop.run()
    assert not seen


def test_equal_times_keep_the_order_of_entry() -> None:
    loop = EventLoop()
    seen: list[int] = []
    for number in range(20):
        loop.at(1.0, seen.append, number)
    loop.run()
    assert seen == list(range(20))


def test_another_seed_may_route_otherwise() -> None:
    from workloads.generate import Lengths, generate

    sessions = list(generate("toolbench", 40, 30.0, 0, Lengths.PER_SESSION))
    cluster = Cluster(
        decode=(_group(2),),
        prefill=(_group(3),),
    )
    routed = {
        tuple(record.worker_id for record in run(sessions, cluster, AMPD, SimulationOptions(seed=seed)).rounds)
        for seed in range(4)
    }
    assert len(routed) > 1


def _group(replicas: int) -> Any:
    from planner.simulator.cluster import ReplicaGroup

    return ReplicaGroup(replicas, Parallelism(1), 0)


def _parallelism(cluster: Cluster, worker_id: str) -> Parallelism:
    role, _, number = worker_id.rpartition("-")
    groups = cluster.prefill if role == "prefill" else cluster.decode
    return [group.parallelism for group in groups for _ in range(group.replicas)][int(number)]
