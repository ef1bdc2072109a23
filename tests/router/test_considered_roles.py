"""The answers of a pools policy that considered several sets of roles: one line for each, and counts by outcome."""

import logging

import pytest

from ampd.policies.base import RoleChange
from ampd.policies.considered import Considered, TriedRoles
from ampd.types import Role
from router.considered_roles import ConsideredRoles, considered_in_words

TRIED = (TriedRoles("2 prefill, 2 decode", 0.9, is_now=True), TriedRoles("1 prefill, 3 decode", 0.95))
LINE = "400 recent rounds served again: 1 prefill, 3 decode 95.0%; 2 prefill, 2 decode (now) 90.0%: "
CHANGED = Considered([RoleChange("d1", Role.PREFILL, "test")], TRIED, 400)
KEPT = Considered([], TRIED, 400)
CHANCE = Considered([], TRIED, 400, is_chance=True)


def test_an_answer_is_one_line() -> None:
    assert considered_in_words(CHANGED) == LINE + "changes of roles: 1"
    assert considered_in_words(KEPT) == LINE + "all stay"
    assert considered_in_words(CHANCE) == LINE + "all stay, because a gain may be chance"


def test_answers_are_counted_by_outcome_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    considered = ConsideredRoles()
    assert considered.last == ""
    with caplog.at_level(logging.INFO):
        for answer in (CHANGED, KEPT, CHANCE, KEPT):
            considered.add(answer)
    assert considered.outcomes == {"changed": 1, "kept": 2, "chance": 1}
    assert considered.last == LINE + "all stay"
    assert [record.getMessage() for record in caplog.records].count("pools: " + considered.last) == 2
    with caplog.at_level(logging.INFO):
        considered.drop("it took 99 s")
    assert considered.outcomes["outdated"] == 1
    assert considered.last == "an answer was dropped, because it took 99 s: all stay"
    assert caplog.messages[-1] == "pools: " + considered.last
