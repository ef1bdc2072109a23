"""What a replay attains, and when a gain is more than chance."""

from dataclasses import replace
from typing import Any

import pytest

from ampd.perf.piecewise import PiecewiseModel
from ampd.policies.base import PoolsSituation
from ampd.recent_load import RecentRound
from ampd.types import Moves, Parallelism, Role, Slo
from planner.look_ahead.comparison import Replay, replay
from planner.look_ahead.recorded import Decoding, Present, recorded_load
from planner.simulator.outcome import SimulationRun
from planner.simulator.simulate import simulate

from .lab import MODEL, question, workers_of


def met(*numbers: int) -> frozenset[tuple[str, int]]:
    return frozenset(("s", number) for number in numbers)


def test_a_gain_must_be_large_and_no_chance() -> None:
    base = Replay(met(*range(80)), 0.80)
    assert Replay(met(*range(84)), 0.84).is_better_than(base, 0.02)
    assert not Replay(met(*range(83)), 0.83).is_better_than(base, 0.02)  # three rounds, against none: chance
    assert not Replay(met(*range(84)), 0.84).is_better_than(base, 0.05)
    assert not Replay(met(*range(20, 104)), 0.84).is_better_than(base, 0.02)  # 24 won, 20 lost


def situation(slo: Slo, *roles: Role) -> PoolsSituation:
    return question(workers_of(*roles), {}, slo, 9.0)


def test_long_prefills_want_prefill_workers() -> None:
    """Eight prompts of 1,500 tokens per second, with short answers, never prefilled on a decode worker."""
    load = {f"s{n}": [RecentRound(n / 8, 0, 1500, n / 8 + 0.5, 4, is_met=False)] for n in range(80)}
    asked = situation(Slo(1.0, 0.02), Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE)
    now = {view.worker_id: view.role for view in asked.workers}
    recorded = recorded_load(load)
    present, more = (
        replay(recorded, now, asked),
        replay(recorded, now | {"w1": Role.PREFILL, "w2": Role.PREFILL}, asked),
    )
    assert more.is_better_than(present, 0.02)


def test_kv_that_sessions_have_is_not_computed_again() -> None:
    load = {f"s{n}": [RecentRound(n / 4, 20_000, 20_100, n / 4 + 0.5, 4, is_met=True)] for n in range(40)}
    asked = situation(Slo(0.5, 0.05), Role.DECODE)
    now = {"w0": Role.DECODE}
    assert replay(recorded_load(load), now, asked).share == 1.0
    cold = {name: [replace(item, kept_tokens=0) for item in rounds] for name, rounds in load.items()}
    assert replay(recorded_load(cold), now, asked).share < 0.5


def test_rounds_that_do_not_end_in_time_are_missed() -> None:
    load = {
        "s": [RecentRound(0.0, 0, 100, 1.0, 5000, is_met=True)],
        "t": [RecentRound(0.0, 0, 100, 1.0, 4, is_met=True)],
    }
    done = replay(recorded_load(load), {"w0": Role.DECODE}, situation(Slo(0.5, 1e-6), Role.DECODE))
    assert ("s", 0) not in done.met


def test_what_a_round_decoded_before_counts_in_its_itl() -> None:
    """One step takes longer than the target, and the tokens before were fast or slow."""
    item = RecentRound(0.0, 0, 100)
    for token_s, is_met in ((1e-6, True), (1.0, False)):
        present = Present({"s": "w0"}, [Decoding("s", "w0", item, 400, token_s)], [])
        recorded = recorded_load({}, present, {"other": [RecentRound(0.0, 0, 100, 1.0, 410, is_met=True)]})
        step_s = MODEL.decode_step_s(1, 500, Parallelism(1))
        done = replay(recorded, {"w0": Role.DECODE}, situation(Slo(5.0, step_s / 2), Role.DECODE))
        assert bool(done.met) is is_met


def test_a_replay_takes_the_hand_over_passes_of_the_engines() -> None:
    """Many short outputs of long prompts: with a pass for each of them the decode worker's steps are late.

    The passes are no steps, because with the engine's backend they were not measured to save anything.
    """
    load = {f"s{n}": [RecentRound(n / 40, 0, 200, n / 40 + 0.5, 8, is_met=True)] for n in range(200)}
    asked = situation(Slo(1.0, 0.007), Role.PREFILL, Role.DECODE)
    asked = replace(asked, model=PiecewiseModel(MODEL.profile, backend="not measured"))
    now = {view.worker_id: view.role for view in asked.workers}
    without = replace(asked, others=replace(asked.others, hand_over_pass=False))
    recorded = recorded_load(load)
    assert replay(recorded, now, without).share > replay(recorded, now, asked).share + 0.3


@pytest.mark.parametrize("moves", ["never", "needed", "any"])
def test_sessions_of_a_replay_move_as_those_of_the_graph(moves: Moves, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's owner is a prefill worker in the replayed roles, and another worker owns sessions."""
    runs = list[SimulationRun]()

    def watched(*given: Any) -> SimulationRun:
        runs.append(simulate(*given))
        return runs[-1]

    monkeypatch.setattr("planner.look_ahead.comparison.simulate", watched)
    rounds = [RecentRound(20.0 * n, 100 * n, 100 * n + 100, 20.0 * n + 0.5, 4, is_met=True) for n in (1, 2)]
    asked = situation(Slo(1.0, 0.05), Role.DECODE, Role.DECODE)
    asked = replace(asked, others=replace(asked.others, moves=moves))
    recorded = recorded_load({"s": rounds}, Present({"s": "w0"}, [], []))
    replay(recorded, {"w0": Role.PREFILL, "w1": Role.DECODE}, asked)
    assert runs[0].moves == (None if moves == "never" else {"role": 1})
