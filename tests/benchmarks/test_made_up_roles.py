"""Made-up agents: the same for all ways to choose roles, and by turns."""

from dataclasses import replace

from ampd.types import Slo
from benchmarks.made_up_roles.__main__ import CASES, row
from benchmarks.made_up_roles.agents import READERS, TALKERS, TOOLS, arriving


def test_kinds_take_turns_of_a_minute_and_a_seed_gives_the_same_sessions() -> None:
    sessions = arriving((READERS, TALKERS), 2.0, 240.0, 3)
    assert {(int(each.arrival_s / 60) % 2, each.session_id.split("-")[0]) for each in sessions} == {
        (0, "readers"),
        (1, "talkers"),
    }
    assert sessions == arriving((READERS, TALKERS), 2.0, 240.0, 3)
    assert sessions != arriving((READERS, TALKERS), 2.0, 240.0, 4)


def test_lengths_have_their_medians() -> None:
    first, *_ = zip(*(each.rounds for each in arriving((TOOLS,), 10.0, 100.0, 1) if len(each.rounds) > 1), strict=False)
    middle = sorted(item.incr_tokens for item in first)[len(first) // 2]
    assert 0.8 * TOOLS.first_tokens[0] < middle < 1.25 * TOOLS.first_tokens[0]


def test_a_row_has_what_each_way_attained() -> None:
    case = replace(CASES[0], slo=Slo(100.0, 10.0), seconds=10.0)
    assert row(case, ("static",), 0.5, 1, looks=False).endswith("seed 1 | 100.0 / 100.0 (0) |")
