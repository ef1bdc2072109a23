"""What coordinators see late: never longer ago than said, and windows empty also where nothing happens any more."""

from dataclasses import replace

from ampd.policies.base import RoutingSituation
from ampd.types import RouteDecision, WorkerView
from planner.simulator.options import SimulationOptions

from .lab import AMPD, REMOTE, RandomRouting, run, session, single


def test_a_worker_that_was_slow_once_is_not_slow_for_ever() -> None:
    """The burst makes the prefill worker's window bad; a minute later it is empty, and the worker idle."""
    burst = [session(f"burst{number}", (9000, 2)) for number in range(4)]
    later = session("later", (500, 2), arrival_s=60.0)
    for delay_s, coordinators in ((0.0, 1), (0.2, 1), (0.0, 2)):
        how = SimulationOptions(state_delay_s=delay_s, coordinators=coordinators)
        done = run([*burst, later], single(), AMPD, how)
        (record,) = [record for record in done.rounds if record.session_id == "later"]
        assert (record.route, record.reason) == ("remote", "ttft-slack")


def test_a_decode_batch_is_seen_while_it_runs() -> None:
    """Nobody joins or leaves the batch for seconds; its window and its context are seen to grow all the same."""
    seen: list[WorkerView] = []

    class Watching(RandomRouting):
        def route(self, situation: RoutingSituation) -> RouteDecision:
            seen.append(situation.decode)
            return super().route(situation)

    sessions = [session("long", (100, 2000)), session("probe", (16, 2), arrival_s=4.0)]
    run(sessions, single(prefill=0), replace(AMPD, routing=Watching()), SimulationOptions(state_delay_s=0.2))
    empty, running = seen
    assert empty.decode_batch == empty.itl.count == 0
    assert running.decode_batch == 1
    # The first token comes after the prefill, the others every step; the view is at most a quarter of a second old.
    step_s = running.itl.mean_s
    assert 3.5 / step_s <= running.itl.count <= 4.0 / step_s
    assert running.decode_context_tokens == 100 + 1 + running.itl.count


def test_a_view_keeps_device_and_store_apart_as_a_live_worker_does() -> None:
    seen: list[WorkerView] = []

    class Watching(RandomRouting):
        def route(self, situation: RoutingSituation) -> RouteDecision:
            seen.append(replace(situation.decode, held_tokens=dict(situation.decode.held_tokens)))
            return super().route(situation)

    cluster = single(prefill=0)
    decode = tuple(replace(group, kv_capacity_tokens=4000, kv_store_tokens=8000) for group in cluster.decode)
    sessions = [
        session("idle", (320, 1), (10, 1), tool_s=100.0),
        session("runs", (160, 2000), arrival_s=2.0),
        session("probe", (16, 2), arrival_s=4.0),
    ]
    run(sessions, replace(cluster, decode=decode), replace(AMPD, routing=Watching()), SimulationOptions())
    view = seen[2]
    assert (view.kv_capacity_tokens, view.kv_used_tokens) == (4000, 160 + 2000)
    assert (view.store_capacity_tokens, view.store_used_tokens, view.held_tokens) == (8000, 320, {"idle": 320})


def test_a_coordinator_sees_its_own_decisions_at_once_and_no_longer_than_they_last() -> None:
    seen: list[list[str]] = []

    class Watching(RandomRouting):
        def route(self, situation: RoutingSituation) -> RouteDecision:
            seen.append([waiting.task_id for waiting in situation.prefill[0].queue])
            return REMOTE.routing.route(situation)

    sessions = [session(name, (500, 2), arrival_s=arrival_s) for name, arrival_s in (("a", 0), ("b", 0), ("c", 60))]
    run(sessions, single(), replace(AMPD, routing=Watching()), SimulationOptions(state_delay_s=0.2))
    assert seen == [[], ["a/0"], []]
