"""One simulation of the contest: the time that sessions may take, and shares that starving cannot raise."""

from __future__ import annotations

import pytest

from ampd.types import Slo
from benchmarks.policies.contest import measure, run, time_at_targets_s
from benchmarks.policies.contestants import ALWAYS_REMOTE
from workloads.trace import Round, Session

from .lab import TINY


def test_time_at_targets_counts_tools_and_tokens() -> None:
    rounds = (Round(incr_tokens=5, output_tokens=11), Round(incr_tokens=5, output_tokens=1, tool_s=3.0))
    session = Session(session_id="s", arrival_s=9.0, rounds=rounds)
    assert time_at_targets_s(session, Slo(0.5, 0.1)) == pytest.approx(0.5 + 1.0 + 3.0 + 0.5)


def test_starving_is_not_sustained() -> None:
    sessions, done = run(TINY, ALWAYS_REMOTE, 1.0, 0)
    fine = measure(TINY, sessions, done)
    assert fine.in_time == 1.0
    assert fine.sustained_rounds == fine.rounds > 0.9
    victims = {session.session_id for session in sessions[:2]}
    late = [record for record in done.rounds if record.session_id in victims and record.index == 0]
    assert len(late) == 2
    for each in late:
        assert each.e2e_s is not None
        each.e2e_s += 1_000.0
    starved = measure(TINY, sessions, done)
    assert starved.rounds == fine.rounds
    assert starved.in_time == pytest.approx(1 - 2 / len(sessions))
    assert starved.sustained_rounds == 0.0
