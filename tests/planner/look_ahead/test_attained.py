"""What the present roles attained, by the record."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ampd.recent_load import Load, RecentRound
from ampd.types import PrefillTask, Role
from planner.look_ahead.pools import attained

from .lab import SLO, question, workers_of


def ended(sent_s: float, ended_s: float, *, is_met: bool) -> RecentRound:
    return RecentRound(sent_s, 0, 10, ended_s, 4, is_met=is_met)


def of(load: Load, since_s: float, least_rounds: int = 1, queued: Sequence[str] = ()) -> float | None:
    worker, *_ = workers_of(Role.PREFILL)
    tasks = tuple(PrefillTask(f"{name}/0", name, 0, 10, 0.0, SLO) for name in queued)
    return attained(question([replace(worker, queue=tasks)], load), since_s, least_rounds)


def test_it_is_the_mean_of_rounds_and_sessions_that_ended_since_then() -> None:
    load = {
        "met": [ended(1.0, 5.0, is_met=True), ended(5.0, 6.0, is_met=True)],
        "missed": [ended(1.0, 5.0, is_met=True), ended(5.0, 6.0, is_met=False)],
    }
    assert of(load, 4.0) == (3 / 4 + 1 / 2) / 2
    assert of(load, 5.5) == (1 / 2 + 1 / 2) / 2
    assert of(load, 7.0) is None
    assert of(load, 4.0, least_rounds=5) is None


def test_a_long_output_is_no_miss() -> None:
    """Outputs differ in length. A round that lasts longer than most others decodes, and may be on time."""
    load = {str(n): [ended(0.0, 1.0, is_met=True)] for n in range(9)} | {"slow": [ended(0.0, 9.0, is_met=True)]}
    assert of(load | {"decodes": [RecentRound(1.0, 0, 10)]}, 0.0) == 1.0


def test_a_round_that_waits_longer_than_its_target_is_missed_and_so_is_one_that_never_ends() -> None:
    load = {"a": [ended(0.0, 2.0, is_met=True)], "b": [RecentRound(8.5, 0, 10)]}
    assert of(load, 0.0) == 1.0
    assert of(load, 0.0, queued="b") == 0.5
    assert of(load | {"b": [RecentRound(6.9, 0, 10)]}, 0.0) == 0.5


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=20))
def test_it_is_a_share_and_one_only_if_all_was_met(outcomes: Sequence[tuple[str, bool]]) -> None:
    load: dict[str, list[RecentRound]] = {}
    for number, (name, is_met) in enumerate(outcomes):
        load.setdefault(name, []).append(ended(float(number), number + 1.0, is_met=is_met))
    share = of(load, 0.0)
    assert share is not None
    assert 0 <= share <= 1
    assert (share == 1) == all(is_met for _, is_met in outcomes)
