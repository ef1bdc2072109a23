"""Every ordering in a simulated cluster: passes of several prefills, waits, and each round exactly once."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from ampd.policies.base import OrderingSituation, Pick, Run, Wait
from ampd.policies.registry import create
from ampd.serving.prefill_queue import LONGEST_WAIT_S, SHORTEST_WAIT_S
from ampd.types import Parallelism
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.outcome import SimulationRun
from workloads.trace import Session

from .lab import (
    LOCAL,
    MODEL,
    ORDERINGS,
    REMOTE,
    RouteBy,
    by,
    run,
    session,
    single,
)

TP1 = Parallelism(1)


class WaitFor:
    """Runs all that is there, together, once there are `count` of them; waits a moment at a time until then."""

    def __init__(self, count: int, wait_s: float) -> None:
        self._count = count
        self._wait_s = wait_s

    def pick(self, situation: OrderingSituation) -> Pick:
        count = len(situation.queue)
        return Run(0, together=tuple(range(1, count))) if count >= self._count else Wait(self._wait_s)


def check_each_round_once(done: SimulationRun, sessions: Sequence[Session]) -> None:
    ended = defaultdict(list)
    for each in done.rounds:
        ended[each.session_id].append(each)
    assert set(ended) == {each.session_id for each in sessions}
    for planned in sessions:
        rounds = ended[planned.session_id]
        assert [record.index for record in rounds] == list(range(len(rounds)))
        assert len(rounds) == len(planned.rounds) or rounds[-1].error
        assert not any(record.error for record in rounds[:-1])


@pytest.mark.parametrize("name", ORDERINGS)
def test_every_ordering_serves_a_loaded_cluster_and_says_the_same_again(name: str) -> None:
    dice = random.Random(3)
    sessions = [
        session(
            f"s{number}",
            *((dice.choice([40, 120, 2500]), dice.randrange(2, 60)) for _ in range(3)),
            arrival_s=0.02 * number,
            tool_s=0.05,
        )
        for number in range(60)
    ]
    each, other = (run(sessions, single(prefill=2), by(create("ordering", name))) for _ in range(2))
    check_each_round_once(each, sessions)
    assert each.rounds == other.rounds
    in_order = run(sessions, single(prefill=2), REMOTE)
    if name not in ("fcfs", "edf"):  # edf with one target is order of arrival
        assert [record.ttft_s for record in each.rounds] != [record.ttft_s for record in in_order.rounds]


@pytest.mark.parametrize("base", [REMOTE, LOCAL], ids=["remote", "local"])
def test_a_pass_of_several_is_one_pass_of_an_idle_engine(base: Policies) -> None:
    sessions = [session(name, (tokens, 1), arrival_s=at_s) for name, tokens, at_s in (("a", 100, 0), ("b", 60, 0.3))]
    done = run(sessions, single(), by(WaitFor(2, 5.0), base), SimulationOptions(keeps_timeline=True))
    spans = {span.detail["session"]: span for span in done.timeline if span.kind == "prefill"}
    together_s = MODEL.prefill_s(0, 160, TP1)
    for span in spans.values():
        assert (span.start_s, span.end_s) == pytest.approx((0.3, 0.3 + together_s))
    assert {record.session_id: record.ttft_s for record in done.rounds} == pytest.approx(
        {"a": 0.3 + together_s, "b": together_s}
    )


def test_a_pass_behind_another_is_one_pass_too() -> None:
    sessions = [
        session("first", (3000, 1)),
        *(session(name, (50, 1), arrival_s=0.01 * (number + 1)) for number, name in enumerate("abc")),
    ]
    done = run(sessions, single(), by(WaitFor(1, 0.0)), SimulationOptions(keeps_timeline=True))
    first_s, three_s = MODEL.prefill_s(0, 3000, TP1), MODEL.prefill_s(0, 150, TP1)
    assert first_s > 0.03
    ends = {span.detail["session"]: span.end_s for span in done.timeline if span.kind == "prefill"}
    assert ends == pytest.approx({"first": first_s, **dict.fromkeys("abc", first_s + three_s)})


def test_members_with_a_history_are_read_before_the_pass_begins() -> None:
    sessions = [session(name, (1000, 2), (tokens, 1), tool_s=1.0) for name, tokens in (("a", 40), ("b", 24))]
    second_remote = by(WaitFor(2, 5.0), RouteBy(lambda index: index == 1).policies())
    done = run(sessions, single(), second_remote, SimulationOptions(keeps_timeline=True, kv_read_s=0.1))
    reads = [span for span in done.timeline if span.kind == "kv-history"]
    assert [span.detail["session"] for span in reads] == ["a", "b"]
    passes = [span for span in done.timeline if span.kind == "prefill" and span.worker_id == "prefill-0"]
    assert {span.start_s for span in passes} == {max(span.end_s for span in reads)}
    assert len(passes) == 2


def test_a_single_short_waits_for_company_and_then_goes() -> None:
    laps = create("ordering", "laps", max_wait_s=0.2)
    done = run([session("a", (100, 1))], single(), by(laps))
    assert done.rounds[0].ttft_s == pytest.approx(0.1 + MODEL.prefill_s(0, 100, TP1))
    done = run([session("a", (1000, 1))], single(), by(laps))
    assert done.rounds[0].ttft_s == pytest.approx(MODEL.prefill_s(0, 1000, TP1)), "long ones do not wait"


@pytest.mark.parametrize("wait_s", [1e-15, 1e-6, 0.3])
def test_a_policy_that_only_waits_ends_too(wait_s: float) -> None:
    sessions = [session("a", (100, 2), (20, 2), arrival_s=1000.0), session("b", (70, 1), arrival_s=1003.0)]
    done = run(sessions, single(), by(WaitFor(99, wait_s)))
    check_each_round_once(done, sessions)
    assert done.events < 3 * (LONGEST_WAIT_S / SHORTEST_WAIT_S + 100)
    # The oldest one runs after the longest wait, and the next one after another.
    assert {record.session_id: record.queued_s for record in done.rounds if record.index == 0} == pytest.approx(
        {"a": LONGEST_WAIT_S, "b": 2 * LONGEST_WAIT_S - 3.0}, abs=0.05
    )
