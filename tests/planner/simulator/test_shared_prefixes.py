"""Sessions that share a prefix: its KV is there once, later sessions find it, and decisions know of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampd.policies.base import BindingSituation, RoutingSituation
from ampd.policies.registry import create
from ampd.types import RouteDecision
from planner.simulator.kv_memory import KvMemory
from planner.simulator.options import SimulationOptions
from planner.simulator.shared_prefixes import ResidentPrefixes, SessionPrefix
from workloads.trace import Session, SharedPrefix

from .lab import LOCAL, REMOTE, WatchedMemory, clusters, options, policies, run, session, sharing_session_lists, single
from .lab import watched_memories as watched
from .test_simulate import Case, the_rules_of_every_cluster_hold
from .test_simulate_store import with_stores

TIMELINE = SimulationOptions(keeps_timeline=True)


def sharing(name: str, *rounds: tuple[int, int], tokens: int, arrival_s: float = 0.0, key: str = "system") -> Session:
    prefix = SharedPrefix(id=key, tokens=tokens)
    return session(name, *rounds, arrival_s=arrival_s).model_copy(update={"shared_prefix": prefix})


class Asked:
    """Policies that note the situations in which they were asked."""

    def __init__(self) -> None:
        self.bindings: list[BindingSituation] = []
        self.routings: list[RoutingSituation] = []

    def bind(self, situation: BindingSituation) -> str:
        self.bindings.append(situation)
        return situation.decode[0].worker_id

    def route(self, situation: RoutingSituation) -> RouteDecision:
        self.routings.append(situation)
        return REMOTE.routing.route(situation)


def computed(sessions: list[Session], chosen=LOCAL, **how: Any) -> dict[str, int]:  # type: ignore[no-untyped-def]
    """Tokens that prefills computed, by session."""
    done = run(sessions, single(), chosen, replace(TIMELINE, **how))
    assert not any(record.error for record in done.rounds)
    tokens: dict[str, int] = {}
    for span in done.timeline:
        if span.kind == "prefill":
            tokens[span.detail["session"]] = tokens.get(span.detail["session"], 0) + span.detail["tokens"]
    return tokens


@pytest.mark.parametrize("knows_prefixes", [True, False])
def test_the_second_session_computes_what_it_does_not_share(knows_prefixes: bool) -> None:
    first, later = sharing("a", (1000, 5), tokens=900), sharing("b", (1000, 5), tokens=900, arrival_s=5.0)
    # 896 tokens are full pages.
    assert computed([first, later], knows_prefixes=knows_prefixes) == {"a": 1000, "b": 104}
    assert computed([first, later], REMOTE)["b"] - computed([first, session("b", (1000, 5), arrival_s=5.0)], REMOTE)[
        "b"
    ] == pytest.approx(-896)
    other = sharing("b", (1000, 5), tokens=900, arrival_s=5.0, key="another")
    assert computed([first, other]) == {"a": 1000, "b": 1000}


def test_a_prompt_that_is_all_prefix_computes_its_last_page() -> None:
    first, later = sharing("a", (960, 5), tokens=960), sharing("b", (960, 5), tokens=960, arrival_s=5.0)
    assert computed([first, later]) == {"a": 960, "b": 16}


def test_decisions_know_a_prefix_from_the_second_session_on() -> None:
    asked = Asked()
    sessions = [sharing(name, (1000, 5), tokens=900, arrival_s=5.0 * at) for at, name in enumerate("abc")]
    run(sessions, single(), replace(REMOTE, binding=asked, routing=asked))
    # What one session has used is not known to be shared. The third one is known to find it.
    assert [situation.shared_tokens for situation in asked.bindings] == [{}, {}, {"decode-0": 896}]
    assert [situation.task.hist_tokens for situation in asked.routings] == [0, 0, 896]
    assert asked.routings[2].shared_tokens == {"decode-0": 896, "prefill-0": 896}
    asked = Asked()
    run(sessions, single(), replace(REMOTE, binding=asked, routing=asked), SimulationOptions(knows_prefixes=False))
    assert all(not situation.shared_tokens and not situation.task.hist_tokens for situation in asked.routings)


def test_old_views_know_of_a_prefix_later() -> None:
    asked = Asked()
    sessions = [sharing(name, (1000, 5), tokens=900, arrival_s=0.5 * at) for at, name in enumerate("abcde")]
    late = SimulationOptions(state_delay_s=0.9)
    run(sessions, single(), replace(REMOTE, binding=asked, routing=asked), late)
    assert [bool(situation.shared_tokens) for situation in asked.bindings] == [False, False, False, True, True]


def test_what_is_held_for_others_is_not_read_again() -> None:
    sessions = [sharing(name, (1000, 5), tokens=900, arrival_s=5.0 * at) for at, name in enumerate("abc")]
    done = run(sessions, single(), REMOTE)
    assert [record.kv_history_tokens for record in done.rounds] == [0, 0, 0]
    assert [record.kv_increment_tokens for record in done.rounds] == [1000 // 16 * 16, 96, 96]


def test_a_rewritten_context_shares_its_beginning_only() -> None:
    asked = Asked()
    rewritten = sharing("b", (1000, 5), (1000, 5), tokens=900, arrival_s=5.0)
    rounds = rewritten.rounds[0], rewritten.rounds[1].model_copy(update={"keep_tokens": 500})
    sessions = [
        sharing("a", (1000, 5), tokens=900),
        rewritten.model_copy(update={"rounds": rounds}),
        sharing("c", (1000, 5), tokens=900, arrival_s=9.0),
    ]
    with watched() as memories:
        run(sessions, single(), replace(REMOTE, binding=asked, routing=asked))
    assert [situation.shared_tokens.get("prefill-0") for situation in asked.routings] == [None, None, 496, 896]
    assert all(memory.session_tokens == 0 for memory in memories)


def test_a_prefix_takes_memory_once_and_goes_when_memory_is_needed() -> None:
    prefixes = {name: SessionPrefix("system", 64) for name in "abc"}
    memory = WatchedMemory(160, 16, prefixes)
    for name in "ab":
        assert memory.reserve(name, 96)
        memory.computed(name, 96)
    assert memory.used_tokens == 64 + 2 * 32
    memory.settle("a", 96)
    memory.settle("b", 96)
    # Another session evicts the idle ones, and then what no session needs.
    assert memory.reserve("x", 96)
    assert (memory.held, memory.held_tokens("c"), memory.used_tokens) == ({}, 64, 160)
    assert memory.shared_prefixes() == {"system": 64}
    assert memory.session_tokens == 96
    assert not memory.reserve("y", 96)
    assert memory.reserve("z", 64)
    assert (memory.held_tokens("c"), memory.shared_prefixes(), memory.used_tokens) == (0, {}, 160)


def test_a_session_does_not_lose_its_prefix_to_make_room_for_itself() -> None:
    memory = WatchedMemory(160, 16, {name: SessionPrefix("system", 64) for name in "ab"})
    assert memory.reserve("a", 96)
    memory.settle("a", 96)
    memory.release("a")
    assert memory.reserve("x", 64)
    assert memory.reserve("b", 96)
    assert memory.held_tokens("b") == 64


@pytest.mark.parametrize("left", [0, 16])
def test_a_session_that_has_left_its_prefix_does_not_wait_for_the_memory_of_it(left: int) -> None:
    memory = WatchedMemory(160, 16, {"a": SessionPrefix("system", 64), "b": SessionPrefix("system", left)})
    assert memory.reserve("a", 96)
    memory.settle("a", 96)
    memory.release("a")
    assert memory.reserve("b", 160)
    assert (memory.held_tokens("b"), memory.used_tokens) == (0, 160)


def test_the_end_of_a_prefix_that_only_an_ended_session_had_makes_room() -> None:
    """Otherwise the round would wait for ever: its own session keeps the prefix here."""
    memory = KvMemory(160, 16, {"short": SessionPrefix("a", 32), "long": SessionPrefix("a", 64)})
    for name, tokens in (("long", 64), ("short", 96)):
        assert memory.reserve(name, tokens)
        memory.settle(name, tokens)
    memory.release("long")
    assert memory.used_tokens == 64 + 64
    assert memory.reserve("short", 160)
    assert memory.used_tokens == 160


def test_a_memory_without_sessions_that_share_is_as_before() -> None:
    none = ResidentPrefixes({}, 16)
    assert (none.change("s", 32, 80), none.growth("s", 32, 80), none.held_tokens("s")) == (48, 48, 0)
    assert (none.unused_tokens, none.published(), none.evict_unused("s")) == (0, {}, 0)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_rules_hold_where_sessions_share(data: st.DataObject) -> None:
    cluster = data.draw(clusters)
    if store_tokens := data.draw(st.sampled_from([0, 0, 2000, 1_000_000])):
        cluster = with_stores(cluster, store_tokens)
    how = replace(data.draw(options), knows_prefixes=data.draw(st.booleans()))
    case = Case(data.draw(sharing_session_lists()), cluster, data.draw(policies), how)
    with watched() as memories:
        done = case.run()
    the_rules_of_every_cluster_hold(case, done)
    assert memories
    assert all(not memory.held and not memory._protections and not memory.session_tokens for memory in memories)


def test_least_kv_prefers_the_worker_with_the_prefix() -> None:
    rounds = (1000, 5), (50, 5), (50, 5)
    sessions = [sharing(name, *rounds, tokens=900, arrival_s=0.2 * at) for at, name in enumerate("abcd")]
    cluster = replace(single(), decode=(replace(single().decode[0], replicas=2, kv_capacity_tokens=50_000),))
    chosen = replace(LOCAL, binding=create("binding", "least-kv"))
    bound = {record.session_id: record.decode_worker_id for record in run(sessions, cluster, chosen).rounds}
    # The third session is the second one at its worker. From then on the prefix is known there.
    assert bound["a"] != bound["b"]
    assert bound["d"] == bound["c"]


def test_a_view_lists_the_prefixes_that_were_used_last() -> None:
    prefixes = {f"{user}{number}": SessionPrefix(str(number), 16) for number in range(70) for user in "ab"}
    memory = KvMemory(16 * 1000, 16, prefixes)
    for name in prefixes:
        assert memory.reserve(name, 16)
        memory.computed(name, 16)
        memory.settle(name, 16)
    assert list(memory.shared_prefixes()) == [str(number) for number in range(6, 70)]
