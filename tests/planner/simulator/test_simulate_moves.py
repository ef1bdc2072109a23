"""Sessions that move to another owner between two rounds, in the simulator."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given

from ampd.policies.base import PoolsSituation, RoleChange
from ampd.policies.registry import create
from ampd.types import Parallelism, Role, WorkerView
from planner.simulator.options import Cluster, ReplicaGroup, SimulationOptions
from workloads.trace import Session

from .lab import (
    OURS,
    OURS_RESTLESS,
    SLO,
    BindTo,
    options,
    run,
    session,
    session_lists,
    tight_clusters,
    watched_memories,
)

MOVES = SimulationOptions(moves="any", keeps_timeline=True)
TP = Parallelism(1)
TWO = Cluster(decode=(ReplicaGroup(2, TP),))


class TurnAt:
    """Turns the first decode worker to a prefill worker at a time, and notes what it is told."""

    is_idle = False

    def __init__(self, time_s: float) -> None:
        self._time_s = time_s
        self.seen: list[tuple[float, dict[str, WorkerView]]] = []

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        views = {view.worker_id: replace(view, held_tokens=dict(view.held_tokens)) for view in situation.workers}
        self.seen.append((situation.now_s, views))
        due = situation.now_s >= self._time_s
        return [RoleChange("decode-0", Role.PREFILL, "test")] if due else []


TURNED = replace(OURS, binding=BindTo("decode-0"), pools=TurnAt(0.5))


def talk(name: str = "s", rounds: int = 3) -> Session:
    return session(name, *[(1600, 20)] * rounds, tool_s=1.0)


def test_a_session_leaves_an_owner_that_became_a_prefill_worker() -> None:
    with watched_memories() as memories:
        done = run([talk()], TWO, TURNED, MOVES)
        for memory in memories:
            memory.check()
    assert done.moves == Counter(role=1)
    assert [record.decode_worker_id for record in done.rounds] == ["decode-0", "decode-1", "decode-1"]
    assert not any(record.missing_tokens for record in done.rounds)
    assert done.lost_sessions == 0
    reads = [span for span in done.timeline if span.lane == "kv-in"]
    # The second round's context: its history, and its increment where the old owner prefilled it.
    assert sum(span.detail["tokens"] for span in reads if span.worker_id == "decode-1") >= 1600
    assert done.result(SLO)["moves"] == {"role": 1}


def test_a_session_stays_while_moves_are_off() -> None:
    done = run([talk()], TWO, TURNED, replace(MOVES, moves="never"))
    assert {record.decode_worker_id for record in done.rounds} == {"decode-0"}
    assert done.moves is None
    assert "moves" not in done.result(SLO)


def test_the_old_owner_drops_its_kv_after_the_first_round_at_the_new_one() -> None:
    """With local routes only, the old owner does not need the KV for prefills of the session either."""
    turns = TurnAt(0.5)
    policies = replace(TURNED, routing=create("routing", "always-local"), pools=turns)
    done = run([talk()], TWO, policies, MOVES)
    assert done.moves == Counter(role=1)
    assert [record.route for record in done.rounds] == ["local"] * 3
    moved = done.rounds[1]
    assert moved.e2e_s is not None
    ended_s = moved.sent_s + moved.e2e_s
    before, after = (
        [view for at_s, view in turns.seen if (at_s < end) is is_before][-1]
        for is_before, end in [(True, moved.sent_s), (False, ended_s)]
    )
    assert before["decode-0"].held_tokens
    assert not before["decode-1"].held_tokens
    assert not after["decode-0"].held_tokens
    assert after["decode-1"].held_tokens


def test_sessions_move_away_from_a_queue_in_which_they_would_be_late() -> None:
    """All sessions are bound to one of two workers, and their second rounds come together."""
    burst = [session(f"s{number}", (100, 5), (1500, 20), tool_s=1.0, arrival_s=0.02 * number) for number in range(12)]
    policies = replace(OURS, binding=BindTo("decode-0"))
    stay, move = (run(burst, TWO, policies, SimulationOptions(moves=moves)) for moves in ("needed", "any"))
    assert stay.moves == Counter()
    assert move.moves is not None
    assert set(move.moves) == {"ttft"}
    owners = Counter(record.decode_worker_id for record in move.rounds if record.index == 1)
    assert set(owners) == {"decode-0", "decode-1"}
    assert owners["decode-1"] == move.moves["ttft"]
    assert move.attainment(SLO).rounds > stay.attainment(SLO).rounds


@pytest.mark.slow
@given(sessions=session_lists(), cluster=tight_clusters, options=options)
def test_moves_lose_no_round_and_no_page(
    sessions: Sequence[Session], cluster: Cluster, options: SimulationOptions
) -> None:
    with watched_memories():
        done = run(sessions, cluster, OURS_RESTLESS, replace(options, moves="any"))
    assert Counter(done.rounds_planned) >= Counter(record.session_id for record in done.rounds)
    ended = {(record.session_id, record.index): record for record in done.rounds}
    assert len(ended) == len(done.rounds)
    by_error = {record.session_id for record in done.rounds if record.error}
    for item in sessions:
        if item.session_id not in by_error:
            assert all((item.session_id, index) in ended for index in range(len(item.rounds)))
