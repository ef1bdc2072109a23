"""Roles that change: sessions stay where they are bound, new work goes by the new roles, and flips raise attainment."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ampd.policies.base import BindingSituation, PoolsSituation, RoleChange, RoutingSituation
from ampd.policies.registry import create
from ampd.types import Parallelism, Role, RouteDecision, Slo, WorkerView
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from planner.simulator.outcome import SimulationRun
from planner.simulator.simulate import simulate
from workloads.trace import Session

from .lab import AMPD, LOCAL, MODEL, REMOTE, SLO, BindTo, run, session, watched_memories

OFTEN = SimulationOptions(pools_interval_s=0.1)
LATE_VIEWS = replace(OFTEN, state_delay_s=0.5)


class Scripted:
    """Changes roles as told, each when its time has come; notes what it saw."""

    is_idle = False
    is_slow = False
    interval_s = load_s = 0.0

    def __init__(self, *changes: tuple[float, str, Role]) -> None:
        self._changes = list(changes)
        self.seen: list[tuple[float, dict[str, WorkerView]]] = []
        self.changed_s: list[float] = []

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        now_s = situation.now_s
        self.changed_s.append(situation.changed_s)
        self.seen.append((now_s, {worker.worker_id: worker for worker in situation.workers}))
        due = [change for change in self._changes if change[0] <= now_s]
        self._changes = [change for change in self._changes if change not in due]
        return [RoleChange(name, role, "script") for _, name, role in due]


def cluster(prefill: int, decode: int, kv_tokens: int = 0) -> Cluster:
    group = ReplicaGroup(decode, Parallelism(1), kv_tokens)
    return Cluster((group,), (replace(group, replicas=prefill),) if prefill else ())


def turned(*changes: tuple[float, str, Role], base: Policies = REMOTE) -> tuple[Scripted, Policies]:
    script = Scripted(*changes)
    return script, replace(base, pools=script)


def test_static_roles_cost_no_event_and_others_ask_until_the_last_session_is_over() -> None:
    sessions = [session(f"s{number}", (500, 40), (300, 40), arrival_s=number) for number in range(4)]
    script, asked = turned()
    static, done = run(sessions, cluster(1, 2), REMOTE, OFTEN), run(sessions, cluster(1, 2), asked, OFTEN)
    assert done.rounds == static.rounds
    assert done.role_flips == static.role_flips == 0
    assert done.events == static.events + len(script.seen) + 1
    assert [now_s for now_s, _ in script.seen] == pytest.approx([0.1 * step for step in range(len(script.seen))])
    assert done.duration_s - 0.1 <= script.seen[-1][0] <= done.duration_s


def test_without_sessions_nobody_is_asked() -> None:
    script, asked = turned()
    assert run([], cluster(1, 1), asked, OFTEN).events == 1
    assert not script.seen


@pytest.mark.parametrize("how", [OFTEN, LATE_VIEWS])
def test_a_worker_that_turns_to_prefill_keeps_its_sessions_and_gets_no_new_ones(how: SimulationOptions) -> None:
    early = [session(f"early{number}", (800, 200), (300, 60), tool_s=3.0) for number in range(2)]
    later = [session(f"later{number}", (600, 20), (300, 20), arrival_s=1.3 + 0.1 * number) for number in range(8)]
    _, policies = turned((1.0, "decode-0", Role.PREFILL))
    done = run([*early, *later], cluster(1, 2), policies, replace(how, moves="never"))
    homes = {record.session_id: record.decode_worker_id for record in done.rounds}
    assert {homes["early0"], homes["early1"]} == {"decode-0", "decode-1"}
    kept = "early0" if homes["early0"] == "decode-0" else "early1"
    for record in done.rounds:
        assert record.error is None
        assert record.decode_worker_id == homes[record.session_id]
        if record.session_id.startswith("later"):
            assert record.decode_worker_id == "decode-1"
        if record.session_id == kept:
            # Its own worker is no prefill worker for it, and another one may prefill for it.
            assert (record.route, record.worker_id) == ("remote", "prefill-0")
    assert {record.worker_id for record in done.rounds if record.session_id.startswith("later")} == {
        "prefill-0",
        "decode-0",
    }
    assert done.role_flips == 1
    assert done.result(SLO)["role_flips"] == 1
    assert done.worker_roles == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


@pytest.mark.parametrize("how", [OFTEN, LATE_VIEWS])
def test_a_worker_that_turns_to_decode_gets_sessions_and_finishes_its_prefills(how: SimulationOptions) -> None:
    burst = [session(f"burst{number}", (4000, 20)) for number in range(4)]
    later = [session(f"later{number}", (300, 20), arrival_s=4.0 + 0.2 * number) for number in range(6)]
    _, policies = turned((0.5, "prefill-0", Role.DECODE))
    done = run([*burst, *later], cluster(1, 1), policies, how)
    assert all(record.error is None for record in done.rounds)
    assert {record.worker_id for record in done.rounds if record.session_id.startswith("burst")} == {"prefill-0"}
    after = [record for record in done.rounds if record.session_id.startswith("later")]
    assert {each.route for each in after} == {"local"}, "there is no prefill worker any more"
    assert {each.decode_worker_id for each in after} == {"prefill-0", "decode-0"}


def test_a_round_prefilled_on_its_own_worker_is_local_whatever_the_workers_role() -> None:
    _, policies = turned((1.0, "decode-0", Role.PREFILL))
    one_each = [session(f"s{number}", (800, 20), (300, 20), tool_s=2.0) for number in range(2)]
    done = run(one_each, cluster(0, 2), policies, replace(OFTEN, moves="never"))
    routes = {(record.decode_worker_id, record.index): (record.route, record.worker_id) for record in done.rounds}
    assert routes["decode-0", 1] == ("local", "decode-0")
    assert routes["decode-1", 1] == ("remote", "decode-0")


def test_a_mixed_worker_owns_sessions_and_prefills_those_of_the_others() -> None:
    mixed = Cluster((), mixed=(ReplicaGroup(2, Parallelism(1)),))
    done = run([session(f"s{number}", (800, 20), (300, 20), arrival_s=number) for number in range(6)], mixed, REMOTE)
    assert {record.decode_worker_id for record in done.rounds} == {"mixed-0", "mixed-1"}
    assert all(record.route == "remote" and record.worker_id != record.decode_worker_id for record in done.rounds)
    assert done.worker_roles == {"mixed-0": "mixed", "mixed-1": "mixed"}
    alone = run([session("s", (800, 20), (300, 20))], Cluster((), mixed=(ReplicaGroup(1, Parallelism(1)),)), REMOTE)
    assert [(record.route, record.reason) for record in alone.rounds] == [("local", "no-prefill-worker")] * 2


@pytest.mark.parametrize("how", [OFTEN, LATE_VIEWS])
def test_every_role_is_reached_from_every_other(how: SimulationOptions) -> None:
    """From co-located to mixed to split and back: new sessions and new prefills go where the roles of the time say."""
    both = ("decode-0", Role.MIXED), ("decode-1", Role.MIXED)
    split = ("decode-0", Role.PREFILL), ("decode-1", Role.DECODE)
    back = (("decode-0", Role.DECODE),)
    changes = [(at_s, *change) for at_s, step in ((10.0, both), (20.0, split), (30.0, back)) for change in step]
    sessions = [session(f"s{second}", (600, 20), arrival_s=float(second)) for second in range(0, 40, 2)]
    _, policies = turned(*changes)
    done = run(sessions, cluster(0, 2), policies, how)
    seen: dict[int, set[tuple[str, str]]] = {}
    for record in done.rounds:
        seen.setdefault(int((record.sent_s - 1e-9) // 10), set()).add((record.decode_worker_id, record.worker_id))
    first, second = "decode-0", "decode-1"
    assert seen[0] == seen[3] == {(first, first), (second, second)}
    assert seen[1] == {(first, second), (second, first)}
    assert seen[2] == {(second, first)}
    assert done.role_flips == 5


def test_an_evicted_copy_is_no_lost_session() -> None:
    """The first worker owns both sessions. The second prefills for it, and has room for one of the copies."""
    workers = Cluster((), mixed=(ReplicaGroup(1, Parallelism(1), 9000), ReplicaGroup(1, Parallelism(1), 2000)))
    both = [session(f"s{number}", (1300, 20), (64, 20), arrival_s=2.0 * number, tool_s=9.0) for number in range(2)]
    with watched_memories() as memories:
        done = run(both, workers, replace(REMOTE, binding=BindTo("mixed-0")))
    assert all(record.route == "remote" for record in done.rounds)
    assert [bool(memory.evicted_sessions) for memory in memories] == [False, True]
    assert done.lost_sessions == 0


@pytest.mark.parametrize("how", [OFTEN, LATE_VIEWS])
def test_a_new_owner_gets_new_sessions_although_it_has_copies_of_old_ones(how: SimulationOptions) -> None:
    """It has prefilled the sessions of both other workers, so that it holds more KV than either of them."""
    old = [session(f"old{number}", (2000, 20), (100, 20), tool_s=60.0) for number in range(4)]
    new = [session(f"new{number}", (300, 20), (100, 20), arrival_s=20.0 + number, tool_s=60.0) for number in range(4)]
    _, policies = turned((10.0, "prefill-0", Role.DECODE))
    done = run([*old, *new], cluster(1, 2, 20_000), policies, how)
    first = {record.session_id: record for record in done.rounds if not record.index}
    assert {first[each.session_id].worker_id for each in old} == {"prefill-0"}
    assert {first[each.session_id].decode_worker_id for each in new} == {"prefill-0"}


def test_the_last_decode_worker_keeps_its_role() -> None:
    script, policies = turned((0.5, "decode-0", Role.PREFILL), (0.5, "decode-1", Role.PREFILL))
    done = run([session(f"s{number}", (500, 20), arrival_s=number) for number in range(3)], cluster(1, 2), policies)
    assert all(record.error is None for record in done.rounds)
    assert done.role_flips == 1
    _, last = script.seen[-1]
    assert {name for name, view in last.items() if view.role is Role.DECODE} == {"decode-1"}


@pytest.mark.parametrize("how", [OFTEN, LATE_VIEWS])
def test_a_batch_is_seen_also_where_the_role_is_prefill(how: SimulationOptions) -> None:
    script, policies = turned((0.95, "decode-0", Role.PREFILL), base=LOCAL)
    run([session("long", (100, 2000))], cluster(0, 2), replace(policies, binding=First()), how)
    at = {round(now_s, 1): views["decode-0"] for now_s, views in script.seen}
    before, after = at[0.9], at[3.0]
    assert (before.role, after.role) == (Role.DECODE, Role.PREFILL)
    assert before.decode_batch == after.decode_batch == 1
    assert before.decode_context_tokens < after.decode_context_tokens
    assert after.itl.count > before.itl.count > 0


def test_a_role_is_known_at_once_also_where_the_rest_is_seen_late() -> None:
    script, policies = turned((0.95, "decode-0", Role.PREFILL), base=LOCAL)
    run([session("long", (100, 400))], cluster(0, 2), policies, replace(OFTEN, state_delay_s=1000.0))
    roles = {round(now_s, 1): views["decode-0"].role for now_s, views in script.seen}
    assert (roles[1.0], roles[1.1]) == (Role.DECODE, Role.PREFILL)
    assert not any(views[name].decode_batch for _, views in script.seen for name in views), "seen after 1000 s"


def test_the_policy_hears_of_the_last_real_change() -> None:
    """Neither of one to the role that the worker has, nor of one that was not made."""
    kept = (0.15, "decode-0", Role.DECODE)
    script, policies = turned(
        kept, (0.35, "decode-0", Role.PREFILL), (0.55, "decode-1", Role.PREFILL), (0.75, "decode-0", Role.DECODE)
    )
    run([session("s", (100, 400))], cluster(1, 2), policies, OFTEN)
    heard = dict(zip([round(now_s, 1) for now_s, _ in script.seen], script.changed_s, strict=True))
    assert heard[0.0] == heard[0.4] == -math.inf
    assert heard[0.5] == heard[0.8] == pytest.approx(0.4)
    assert heard[0.9] == pytest.approx(0.8)


class First:
    """Binds to the first one."""

    def bind(self, situation: BindingSituation) -> str:
        return situation.decode[0].worker_id


def test_sessions_are_bound_and_refused_by_the_memory_of_those_that_decode_now() -> None:
    small, large = ReplicaGroup(1, Parallelism(1), 1000), ReplicaGroup(1, Parallelism(1), 9000)
    _, policies = turned((1.0, "prefill-0", Role.DECODE), (3.0, "prefill-0", Role.PREFILL))
    arrivals = {"before": 0.5, "between": 2.0, "after": 4.0}
    sessions = [session(name, (2000, 10), arrival_s=at_s) for name, at_s in arrivals.items()]
    done = run(sessions, Cluster((small,), (large,)), policies, OFTEN)
    outcome = {record.session_id: (record.error, record.decode_worker_id) for record in done.rounds}
    for refused in ("before", "after"):
        assert outcome[refused] == (
            "prompt and output have 2010 tokens, the KV memory of a decode worker holds 1000 tokens",
            "",
        )
    assert outcome["between"] == (None, "prefill-0")


def test_lanes_are_given_by_the_laps_pools_and_followed_by_its_routing() -> None:
    policies = replace(REMOTE, routing=create("routing", "laps"), pools=create("pools", "laps"))
    sessions = [session(f"s{n}", (2000 if n % 2 else 100, 10), arrival_s=0.4 * n) for n in range(12)]
    done = run(sessions, cluster(2, 1), policies, OFTEN)
    used = {(record.reason, record.worker_id) for record in done.rounds}
    assert used == {("short", "prefill-0"), ("long", "prefill-1")}
    assert done.role_flips == 0, "the first label of a worker is no flip"


def test_a_lane_under_pressure_gets_another_worker() -> None:
    policies = replace(REMOTE, routing=create("routing", "laps"), pools=create("pools", "laps"))
    sessions = [session(f"s{number}", (2000, 5), arrival_s=0.12 * number) for number in range(60)]
    done = run(sessions, cluster(4, 1), policies, OFTEN)
    assert done.role_flips == 1
    used = {record.worker_id for record in done.rounds}
    assert len(used) == 3, "two were for long prefills at first, one has joined them, one stays for short ones"


# -- flips that help


PATIENT = Slo(2.0, 0.02)


def served(sessions: Sequence[Session], where: Cluster, pools: str) -> SimulationRun:
    named = replace(REMOTE, pools=create("pools", pools))
    return simulate(sessions, where, MODEL, named, PATIENT, SimulationOptions())


def attained(simulation_run: SimulationRun) -> float:
    share = simulation_run.result(PATIENT)["attainment"]["rounds"]
    assert isinstance(share, float)
    return share


def test_arrow_turns_decode_workers_into_prefill_workers_in_a_burst() -> None:
    bursts = [
        session(f"s{burst}/{number}", (4000, 50), arrival_s=15.0 * burst + 0.05 * number)
        for burst in range(4)
        for number in range(16)
    ]
    static, arrow = (served(bursts, cluster(1, 3, 200_000), pools) for pools in ("static", "arrow"))
    assert static.role_flips == 0
    assert 1 <= arrow.role_flips <= 6
    assert attained(arrow) > attained(static) + 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(1, 3), (2, 2), (3, 1)])
def test_arrow_follows_a_load_that_shifts_from_prefill_to_decode_and_back(prefill: int, decode: int) -> None:
    """No fixed layout serves both well; the flips are few, for nothing flips to and fro."""
    long_prompts = [session(f"a{number}", (3000, 30), arrival_s=0.35 * number) for number in range(100)]
    long_answers = [session(f"b{number}", (100, 1500), arrival_s=35 + 0.08 * number) for number in range(600)]
    again = [session(f"c{number}", (3000, 30), arrival_s=120 + 0.35 * number) for number in range(100)]
    sessions = [*long_prompts, *long_answers, *again]
    where = cluster(prefill, decode, 200_000)
    static, arrow = (served(sessions, where, pools) for pools in ("static", "arrow"))
    assert attained(arrow) > attained(static) + 0.3
    assert 2 <= arrow.role_flips <= 4


def test_a_decision_never_names_the_sessions_own_worker_as_a_prefill_worker() -> None:
    seen: list[tuple[str, list[str]]] = []

    class Watching:
        def route(self, situation: RoutingSituation) -> RouteDecision:
            seen.append((situation.decode.worker_id, [worker.worker_id for worker in situation.prefill]))
            return AMPD.routing.route(situation)

    _, policies = turned((1.0, "decode-0", Role.PREFILL), base=replace(AMPD, routing=Watching()))
    sessions = [session(f"s{number}", (500, 20), (200, 20), tool_s=2.0) for number in range(4)]
    run(sessions, cluster(1, 2), policies, OFTEN)
    assert ("decode-0", ["prefill-0"]) in seen
    assert ("decode-1", ["prefill-0", "decode-0"]) in seen
    assert not any(decode in prefill for decode, prefill in seen)
