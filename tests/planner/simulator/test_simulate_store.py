"""Clusters whose workers have KV stores: the rules of every run, and what a store saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.simulator.kv_memory import KvStore
from planner.simulator.options import Cluster, ReplicaGroup
from planner.simulator.outcome import SimulationRun
from workloads.trace_command import Lengths, generate

from .lab import AMPD, LOCAL, MODEL, REMOTE, SLO, clusters, options, policies, run, session, session_lists, single
from .test_simulate import Case, the_rules_of_every_cluster_hold

store_tokens = st.sampled_from([16, 2000, 20_000, 1_000_000])


def with_stores(cluster: Cluster, tokens: int) -> Cluster:
    def stored(groups: tuple[ReplicaGroup, ...]) -> tuple[ReplicaGroup, ...]:
        return tuple(replace(group, kv_store_tokens=tokens) for group in groups)

    return replace(cluster, decode=stored(cluster.decode), prefill=stored(cluster.prefill), mixed=stored(cluster.mixed))


@contextmanager
def watched_stores() -> Iterator[list[KvStore]]:
    """All KV stores of the simulations in the block."""
    stores: list[KvStore] = []

    class WatchedStore(KvStore):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            stores.append(self)

        def write(self, session_id: str, context_tokens: int) -> None:
            super().write(session_id, context_tokens)
            assert self.used_tokens == sum(self.held.values()) <= self.capacity_tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.simulator.worker.KvStore", WatchedStore)
        yield stores


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(sessions=session_lists(), cluster=clusters, tokens=store_tokens, chosen=policies, how=options)
def test_the_rules_hold_in_every_run(sessions, cluster, tokens, chosen, how) -> None:  # type: ignore[no-untyped-def]
    case = Case(sessions, with_stores(cluster, tokens), chosen, how)
    with watched_stores() as stores:
        done = case.run()
    the_rules_of_every_cluster_hold(case, done)
    assert stores
    assert all(not store.held and not store._protections and not store.used_tokens for store in stores), (
        "all have ended"
    )


def figures(done: SimulationRun) -> dict[str, float]:
    assert done.kv_store is not None
    return {**done.kv_store["hit_tokens"], "reload_s": done.kv_store["reload_s"]}


def test_a_session_comes_back_from_the_store_instead_of_being_computed_again() -> None:
    """Two sessions take turns on a device that holds one of them."""
    sessions = [session(name, *[(4000, 10)] * 3, arrival_s=start, tool_s=4.0) for name, start in (("a", 0), ("b", 2))]
    small = single(capacity=13_000, prefill=0)
    without = run(sessions, small, LOCAL)
    stored = run(sessions, with_stores(small, 100_000), LOCAL)
    assert without.lost_sessions > 0
    assert stored.lost_sessions == 0
    assert "kv_store" not in without.result(SLO)
    hits = figures(stored)
    assert hits["store"] > 0
    assert (hits["recomputed"], hits["peer"]) == (0, 0)
    assert hits["device"] + hits["store"] == sum(record.hist_tokens // 16 * 16 for record in stored.rounds)
    assert hits["reload_s"] == pytest.approx(
        hits["store"] * MODEL.reload_s(10_000, single().decode[0].parallelism) / 10_000
    )
    assert sum(record.ttft_s or 0 for record in stored.rounds) < sum(record.ttft_s or 0 for record in without.rounds)


def test_a_device_that_holds_everything_reloads_only_what_peers_give() -> None:
    sessions = list(generate("toolbench", 30, 10.0, 0, Lengths.PER_SESSION))
    local = run(sessions, with_stores(single(prefill=0), 1_000_000), LOCAL)
    assert figures(local)["reload_s"] == 0
    assert [(each.ttft_s, each.e2e_s) for each in local.rounds] == [
        (each.ttft_s, each.e2e_s) for each in run(sessions, single(prefill=0), LOCAL).rounds
    ]
    remote = figures(run(sessions, with_stores(single(), 1_000_000), REMOTE))
    assert remote["peer"] > 0
    assert remote["reload_s"] > 0
    assert remote["store"] == 0


def test_a_store_that_is_too_small_evicts_and_says_so() -> None:
    sessions = list(generate("toolbench", 60, 20.0, 0, Lengths.PER_SESSION))
    store = run(sessions, with_stores(single(capacity=9000), 12_000), AMPD).result(SLO)["kv_store"]
    assert sum(store["evicted_tokens"].values()) > 0
    assert store["device_evictions"] > 0
