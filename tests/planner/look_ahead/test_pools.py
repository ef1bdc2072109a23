"""The look ahead as a policy: when it looks, and what it then changes."""

import random
from collections.abc import Sequence
from dataclasses import replace

from ampd.policies.base import PoolsSituation, RoleChange
from ampd.policies.considered import Considered
from ampd.policies.registry import create
from ampd.recent_load import Load, RecentRound, latest_rounds
from ampd.types import Parallelism, Role
from planner.look_ahead.pools import LookAheadPools
from planner.simulator.cluster import Cluster, ReplicaGroup
from planner.simulator.options import Policies
from planner.simulator.simulate import simulate
from tests.ampd.policies.pools_lab import with_constants
from workloads.trace import Round, Session

from .lab import MODEL, SLO, question, workers_of

POLICY = LookAheadPools()

LONG_PREFILLS = {f"s{n}": [RecentRound(n / 8, 0, 1500, n / 8 + 0.5, 4, is_met=False)] for n in range(80)}
"""Eight prompts of 1,500 tokens per second, which all missed their targets."""


def faster(load: Load, factor: float) -> Load:
    """The rounds at this many times their rate."""
    return {name: [replace(item, sent_s=item.sent_s / factor) for item in rounds] for name, rounds in load.items()}


def situation(load: Load, prefill: int = 1, decode: int = 3) -> PoolsSituation:
    return question(workers_of(*[Role.PREFILL] * prefill, *[Role.DECODE] * decode), load)


def test_it_takes_the_roles_that_attain_more_and_tells_what_it_tried() -> None:
    found = POLICY.change(situation(LONG_PREFILLS))
    assert isinstance(found, Considered)
    assert found.rounds == 80
    present, *others = found.tried
    assert present.is_now
    assert present.roles == "1 prefill, 3 decode"
    best = max(others, key=lambda tried: tried.attained)
    assert best.attained >= present.attained + POLICY.GAIN
    assert [(change.role, change.reason) for change in found] == [(Role.PREFILL, "look-ahead")] * len(found)
    assert in_words_after(found) == best.roles


def in_words_after(changes: Sequence[RoleChange]) -> str:
    return f"{1 + len(changes)} prefill, {3 - len(changes)} decode"


def test_it_looks_at_nothing_while_rounds_meet_their_targets() -> None:
    fine = {name: [replace(item, is_met=True) for item in rounds] for name, rounds in LONG_PREFILLS.items()}
    assert POLICY.change(situation(fine)) == ()


def test_it_looks_when_few_missed_rounds_are_of_many_sessions() -> None:
    """98 % of the rounds met their targets, and 80 % of the sessions met all of theirs."""
    rounds = [
        (f"s{session}", RecentRound(number / 10 + session / 100, 0, 1500, 5.0, 4, is_met=number > 0 or session > 1))
        for session in range(10)
        for number in range(10)
    ]
    load = {name: [item for of, item in rounds if of == name] for name, _ in rounds}
    assert isinstance(POLICY.change(situation(load)), Considered)


def test_it_looks_while_targets_are_met_if_a_rule_of_thumb_would_change_a_role() -> None:
    fine = {name: [replace(item, is_met=True) for item in rounds] for name, rounds in LONG_PREFILLS.items()}
    asked = situation(fine)
    busy = [
        replace(view, decode_batch=64, decode_context_tokens=400_000) if view.role is Role.DECODE else view
        for view in asked.workers
    ]
    assert isinstance(POLICY.change(replace(asked, workers=busy)), Considered)


def test_it_looks_at_nothing_soon_after_a_change_and_without_rounds() -> None:
    asked = situation(LONG_PREFILLS)
    asked.changed_s = asked.now_s - POLICY.COOLDOWN_S / 2
    assert POLICY.change(asked) == ()
    assert POLICY.change(situation({})) == ()
    few = {name: LONG_PREFILLS[name] for name in list(LONG_PREFILLS)[:19]}
    assert POLICY.change(situation(few)) == ()


def test_slow_rounds_count_for_minutes() -> None:
    """Long sessions at a low rate: 20 rounds do not end within 30 s."""
    slow = {
        name: [replace(item, sent_s=40 * item.sent_s, ended_s=40 * item.sent_s + 9.0) for item in rounds]
        for name, rounds in list(LONG_PREFILLS.items())[:40]
    }
    asked = replace(situation(slow), now_s=210.0)
    found = POLICY.change(asked)
    assert isinstance(found, Considered)
    assert found.rounds == 40


def test_a_high_load_is_served_again_for_as_long_as_it_takes_to_show_a_shortage() -> None:
    policy = with_constants(LookAheadPools, ROUNDS_PER_WORKER=1)
    found = policy.change(situation(LONG_PREFILLS))
    assert isinstance(found, Considered)
    assert found.rounds == 80
    assert list(found)


def test_it_tries_no_others_if_the_present_roles_would_serve_all() -> None:
    short = {name: [replace(item, prompt_tokens=100) for item in rounds] for name, rounds in LONG_PREFILLS.items()}
    found = POLICY.change(situation(short))
    assert isinstance(found, Considered)
    assert [tried.is_now for tried in found.tried] == [True]
    assert not found.is_chance


def test_later_others_have_to_beat_what_the_present_roles_really_attained() -> None:
    """The replay has most long prompts late. By the record 95 % were on time, so that none could gain 0.1."""
    short = {f"t{n}": [RecentRound(11 + n / 4, 0, 100, 11.5 + n / 4, 4, is_met=True)] for n in range(60)}
    late = replace(situation(LONG_PREFILLS | short), now_s=26.0)
    on_time = {
        name: [replace(item, is_met=number % 20 > 0)] for number, (name, (item,)) in enumerate(late.load.items())
    }
    policy = with_constants(LookAheadPools, GAIN=0.1)
    assert list(policy.change(late))
    found = policy.change(replace(late, load=on_time))
    assert isinstance(found, Considered)
    assert [tried.is_now for tried in found.tried] == [True]
    assert found.tried[0].attained < 0.9


def test_it_stays_where_nothing_else_is_better() -> None:
    found = POLICY.change(situation(faster(LONG_PREFILLS, 3.0), prefill=0, decode=4))
    assert isinstance(found, Considered)
    assert list(found) == []
    assert len(found.tried) > 1
    assert not found.is_chance


def test_a_gain_of_few_rounds_is_refused_as_chance() -> None:
    """Only the last of eight long prompts is late, and the 72 short ones behind it are not."""
    short = {name: [replace(item, prompt_tokens=200) for item in rounds] for name, rounds in LONG_PREFILLS.items()}
    policy = with_constants(LookAheadPools, GAIN=0.01)
    load = short | {name: LONG_PREFILLS[name] for name in list(LONG_PREFILLS)[:8]}
    found = policy.change(situation(faster(load, 1.15)))
    assert isinstance(found, Considered)
    assert max(tried.attained for tried in found.tried) >= found.tried[0].attained + policy.GAIN
    assert list(found) == []
    assert found.is_chance


def test_roles_must_gain_more_where_a_wrong_change_lasts_longer() -> None:
    """Others gain 0.9 here."""
    policy = with_constants(LookAheadPools, GAIN=0.7)
    asked = situation(LONG_PREFILLS)
    assert [len(policy.change(replace(asked, rest_s=rest_s))) for rest_s in (0.0, 15.0, 22.5)] == [1, 1, 0]
    policy = with_constants(LookAheadPools, GAIN=0.4)
    assert len(policy.change(replace(asked, rest_s=300.0))) == 1, "twice as much at most"


def arriving(rate: float, seed: int) -> PoolsSituation:
    """Long prompts that arrive by chance, for 250 s. One prefill worker carries 3.5 per second."""
    rng, now_s, load = random.Random(seed), 0.0, {}
    for number in range(int(rate * 250)):
        now_s += rng.expovariate(rate)
        load[f"s{number}"] = [RecentRound(now_s, 0, 1500, now_s + 0.5, 4, is_met=False)]
    return replace(situation(load), now_s=now_s)


def test_more_rounds_decide_where_a_gain_may_be_chance() -> None:
    policy, asked = with_constants(LookAheadPools, ROUNDS_PER_WORKER=10), arriving(2.8, 0)
    few = policy.change(replace(asked, load=latest_rounds(asked.load, 43)))
    assert isinstance(few, Considered)
    assert (few.rounds, few.is_chance, list(few)) == (43, True, [])
    found = policy.change(asked)
    assert isinstance(found, Considered)
    assert found.rounds == 4 * 43
    assert [change.role for change in found] == [Role.PREFILL]


def test_more_rounds_may_show_that_a_gain_was_chance() -> None:
    found = with_constants(LookAheadPools, ROUNDS_PER_WORKER=10).change(arriving(2.8, 1))
    assert isinstance(found, Considered)
    assert found.rounds == 4 * 41
    assert list(found) == []


def filled(asked: PoolsSituation, used_tokens: int) -> PoolsSituation:
    """The situation with this much KV of sessions on each worker, of 100,000 tokens."""
    workers = [
        replace(
            view,
            kv_used_tokens=used_tokens,
            kv_capacity_tokens=100_000,
            held_tokens={f"of {view.worker_id}": used_tokens},
        )
        for view in asked.workers
    ]
    return replace(asked, workers=workers)


def test_a_shortage_of_memory_is_answered_before_targets_are_missed() -> None:
    met = {name: [replace(item, prompt_tokens=300, is_met=True)] for name, (item,) in LONG_PREFILLS.items()}
    found = POLICY.change(filled(situation(met), 90_000))
    assert isinstance(found, Considered)
    assert [(change.worker_id, change.role, change.reason) for change in found] == [("w0", Role.DECODE, "kv-short")]
    assert [tried.roles for tried in found.tried] == ["1 prefill, 3 decode", "4 decode"]
    assert POLICY.change(filled(situation(met), 70_000)) == ()


def test_roles_that_were_tried_for_both_reasons_are_listed_once() -> None:
    """Nearly no round would be in time with any roles, so that none gains enough, and the memory is short."""
    late = {f"s{n}": [RecentRound(n / 16, 0, 4000, n / 16 + 0.5, 4, is_met=False)] for n in range(160)}
    found = POLICY.change(filled(situation(late, prefill=2, decode=2), 90_000))
    assert isinstance(found, Considered)
    assert [change.reason for change in found] == ["kv-short"]
    assert sorted(tried.roles for tried in found.tried) == ["1 prefill, 3 decode", "2 prefill, 2 decode", "4 decode"]


def test_a_rule_changes_nothing_if_the_present_roles_serve_the_load_better() -> None:
    """One prefill worker is too few for these prompts, and decode workers take none of other sessions."""
    met = {name: [replace(item, is_met=True)] for name, (item,) in LONG_PREFILLS.items()}
    found = POLICY.change(filled(situation(met, prefill=2, decode=2), 90_000))
    assert isinstance(found, Considered)
    present, changed = found.tried
    assert (present.roles, changed.roles) == ("2 prefill, 2 decode", "1 prefill, 3 decode")
    assert present.attained > changed.attained + POLICY.GAIN
    assert list(found) == []


def test_a_shortage_without_rounds_is_answered_too() -> None:
    assert [change.reason for change in POLICY.change(filled(situation({}), 90_000))] == ["kv-short"]


def test_it_tries_no_roles_that_leave_sessions_too_little_memory() -> None:
    """Three decode workers of 45,000 tokens each would leave 68 % of two others in use."""
    found = POLICY.change(filled(situation(LONG_PREFILLS), 45_000))
    assert isinstance(found, Considered)
    assert [tried.roles for tried in found.tried] == ["1 prefill, 3 decode", "4 decode"]
    found = POLICY.change(filled(situation(LONG_PREFILLS), 10_000))
    assert isinstance(found, Considered)
    assert "2 prefill, 2 decode" in [tried.roles for tried in found.tried]


def test_a_simulated_cluster_that_looks_ahead_serves_more() -> None:
    """Ten prompts of 1,500 tokens per second, none prefilled on a decode worker: one prefill worker is too few."""
    sessions = [
        Session(session_id=f"s{n}", arrival_s=n / 10, rounds=(Round(incr_tokens=1500, output_tokens=8),))
        for n in range(300)
    ]
    group = ReplicaGroup(3, Parallelism(1))
    cluster = Cluster(decode=(group,), prefill=(replace(group, replicas=1),))
    policies = Policies(create("binding", "least-kv"), create("routing", "always-remote"), create("ordering", "fcfs"))
    static = simulate(sessions, cluster, MODEL, policies, SLO)
    looking = simulate(sessions, cluster, MODEL, replace(policies, pools=POLICY), SLO)
    assert looking.role_flips
    assert looking.attainment(SLO).rounds > static.attainment(SLO).rounds + 0.2
