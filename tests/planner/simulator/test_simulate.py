"""The rules of every run: each round once, causes before effects, KV conserved, same seed same result."""

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampd.perf.model import joined_tokens
from ampd.policies.slicing.whole import WholeSlicing
from ampd.types import Parallelism, Role
from benchmarks.detailed_simulation import detailed_result
from planner.simulator.decode_batch import steps_s
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from planner.simulator.outcome import SimulationRun
from workloads.trace import Session
from workloads.trace_command import Lengths, generate

from .lab import (
    AMPD,
    MODEL,
    WatchedMemory,
    clusters,
    options,
    ordering_policies,
    policies,
    routing_policies,
    run,
    session_lists,
    watched_memories,
)


@dataclass(frozen=True)
class Case:
    """All that a simulation is given."""

    sessions: list[Session]
    cluster: Cluster
    policies: Policies
    how: SimulationOptions

    def run(self) -> SimulationRun:
        return run(self.sessions, self.cluster, self.policies, self.how)


cases = {
    name: st.builds(Case, session_lists(), clusters, chosen, options)
    for name, chosen in (("ours", policies), ("orderings", ordering_policies), ("routings", routing_policies))
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", cases)
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_rules_hold_in_every_run(kind: str, data: st.DataObject) -> None:
    case = data.draw(cases[kind])
    with watched_memories() as memories:
        done = case.run()
    the_rules_of_every_cluster_hold(case, done)
    evicted = {session_id for memory in memories for session_id in memory.evicted_sessions}
    a_first_token_needs_all_that_is_new_computed_after_its_turn_in_the_queue(case, done, evicted)
    a_remote_round_reads_computes_returns_and_decodes_in_this_order(case, done)
    kv_is_gone_at_the_end(memories)


def the_rules_of_every_cluster_hold(case: Case, done: SimulationRun) -> None:
    """With or without KV stores and shared prefixes."""
    each_round_ends_exactly_once(case, done)
    no_effect_comes_before_its_cause(case, done)
    the_gaps_between_tokens_are_the_time_between_first_and_last_tokens(done)
    a_run_lasts_until_its_last_token(done)
    a_worker_computes_one_thing_at_a_time(done)
    again = case.run()
    assert (done.rounds, done.gaps, done.timeline, done.kv_store) == (
        again.rounds,
        again.gaps,
        again.timeline,
        again.kv_store,
    ), "same seed"


def each_round_ends_exactly_once(case: Case, done: SimulationRun) -> None:
    ended: dict[str, list[Any]] = defaultdict(list)
    for record in done.rounds:
        ended[record.session_id].append(record)
    assert set(ended) == {session.session_id for session in case.sessions}
    for session in case.sessions:
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


def no_effect_comes_before_its_cause(case: Case, done: SimulationRun) -> None:
    planned = {session.session_id: session for session in case.sessions}
    before: dict[str, float] = {session.session_id: session.arrival_s for session in case.sessions}
    for record in done.rounds:
        tool_s = planned[record.session_id].rounds[record.index].tool_s
        assert record.sent_s == pytest.approx(before[record.session_id] + tool_s, abs=1e-9)
        if record.error:
            continue
        assert record.ttft_s is not None
        assert record.e2e_s is not None
        assert record.ttft_s >= case.how.dispatch_s + record.queued_s - 1e-9
        assert record.e2e_s >= record.ttft_s - 1e-12
        assert record.queued_s >= 0
        assert (record.itl_s is None) == (record.output_tokens == 1)
        theta = _parallelism(case.cluster, record.decode_worker_id)
        token_s = min(MODEL.decode_step_s(1, 0, theta), MODEL.prefill_s(0, 1, theta))
        assert record.e2e_s - record.ttft_s >= (record.output_tokens - 1) * token_s - 1e-9
        before[record.session_id] = record.sent_s + record.e2e_s


def a_first_token_needs_all_that_is_new_computed_after_its_turn_in_the_queue(
    case: Case, done: SimulationRun, evicted: set[str]
) -> None:
    prefills = [span for span in done.timeline if span.kind == "prefill"]
    passes = Counter((span.worker_id, span.start_s) for span in prefills)
    for record in done.rounds:
        if record.error:
            continue
        assert record.ttft_s is not None
        turn_s, first_s = record.sent_s + case.how.dispatch_s + record.queued_s, record.sent_s + record.ttft_s
        mine = [
            span
            for span in prefills
            if span.detail["session"] == record.session_id
            and span.worker_id == record.worker_id
            and turn_s - 1e-9 <= span.start_s
            and span.end_s <= first_s + 1e-9
        ]
        prompt_tokens = record.hist_tokens + record.incr_tokens
        computed_tokens = sum(span.detail["tokens"] for span in mine)
        assert record.incr_tokens <= computed_tokens
        assert computed_tokens <= prompt_tokens
        assert mine[-1].end_s == pytest.approx(first_s)
        alone = all(passes[span.worker_id, span.start_s] == 1 for span in mine)
        if alone:
            assert len(mine) == 1 or not isinstance(case.policies.slicing, WholeSlicing)
            theta = _parallelism(case.cluster, record.worker_id)
            behind_tokens = prompt_tokens - computed_tokens
            for span in mine:
                tokens = span.detail["tokens"]
                # A mixed pass is predicted from the mean history of all its tokens, also of the batch's.
                parts = [(behind_tokens, tokens)]
                joined = [joined_tokens([*parts, (0, batch)]) for batch, _ in enumerate(case.sessions)]
                assert span.end_s - span.start_s >= min(MODEL.prefill_s(*each, theta) for each in joined) - 1e-9
                behind_tokens += tokens
            if record.route == "remote":
                read_in_vain = record.kv_history_tokens > prompt_tokens - computed_tokens
                # What was to come before it has been evicted during the read.
                assert not read_in_vain or record.session_id in evicted


def the_gaps_between_tokens_are_the_time_between_first_and_last_tokens(done: SimulationRun) -> None:
    served = [record for record in done.rounds if record.e2e_s is not None and record.ttft_s is not None]
    assert sum(gap.steps * gap.batch for gap in done.gaps) == sum(each.output_tokens - 1 for each in served)
    gaps_s = sum(steps_s(gap.first_s, gap.growth_s, gap.steps) * gap.batch for gap in done.gaps)
    assert gaps_s == pytest.approx(sum((each.e2e_s or 0.0) - (each.ttft_s or 0.0) for each in served), abs=1e-6)


def a_run_lasts_until_its_last_token(done: SimulationRun) -> None:
    assert done.duration_s == max(
        [0.0, *(record.sent_s + record.e2e_s for record in done.rounds if record.e2e_s is not None)]
    )


def a_worker_computes_one_thing_at_a_time(done: SimulationRun) -> None:
    lanes: dict[str, set[tuple[float, float]]] = defaultdict(set)
    for span in done.timeline:
        assert span.start_s <= span.end_s
        if span.lane == "compute":
            lanes[span.worker_id].add((span.start_s, span.end_s))  # a pass over several prefills is one
    for spans in lanes.values():
        ordered = sorted(spans)
        for (_, end_s), (start_s, _) in pairwise(ordered):
            assert start_s >= end_s - 1e-9


def a_remote_round_reads_computes_returns_and_decodes_in_this_order(case: Case, done: SimulationRun) -> None:
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
                if span.worker_id == record.decode_worker_id and span.start_s >= first_s + case.how.hand_over_s - 1e-9
            ]
            assert arrived
            assert record.e2e_s is not None
            theta = _parallelism(case.cluster, record.decode_worker_id)
            token_s = min(MODEL.decode_step_s(1, 0, theta), MODEL.prefill_s(0, 1, theta))
            assert record.sent_s + record.e2e_s >= min(arrived) + (record.output_tokens - 1) * token_s - 1e-9


def kv_is_gone_at_the_end(memories: list[WatchedMemory]) -> None:
    assert memories
    for memory in memories:
        assert memory.used_tokens == 0, "all sessions have ended"
        assert not memory.held
        assert not memory._protections


@pytest.mark.slow
def test_the_same_seed_gives_the_same_result_in_another_process() -> None:
    """Hashes of strings differ from process to process; results must not."""
    flags = ["tau-bench-airline", "--model=llama-3.1-8b", "--gpu=h20", "--prefill=2xTP1", "--decode=2xTP1"]
    flags += ["--rate=20", "--limit=20", "--kv-capacity-tokens=9000", "--coordinators=3", "--state-delay-s=0.1"]
    flags += ["--pools=static,arrow", "--ttft=0.2", "--json"]
    there = subprocess.run(
        [sys.executable, "-m", "benchmarks.detailed_simulation", *flags],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        check=True,
        text=True,
    )
    assert json.loads(there.stdout) == detailed_result(flags)


def test_another_seed_may_route_otherwise() -> None:
    sessions = list(generate("toolbench", 40, 30.0, 0, Lengths.PER_SESSION))
    cluster = Cluster(decode=(_group(2),), prefill=(_group(3),))
    routed = {
        tuple(record.worker_id for record in run(sessions, cluster, AMPD, SimulationOptions(seed=seed)).rounds)
        for seed in range(4)
    }
    assert len(routed) > 1


def _group(replicas: int) -> ReplicaGroup:
    return ReplicaGroup(replicas, Parallelism(1), 0)


def _parallelism(cluster: Cluster, worker_id: str) -> Parallelism:
    role, _, number = worker_id.rpartition("-")
    groups = cluster.groups[Role(role)]
    return [group.parallelism for group in groups for _ in range(group.replicas)][int(number)]
