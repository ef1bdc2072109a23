"""One simulation of the contest: the time that sessions may take, and shares that starving cannot raise."""

from __future__ import annotations

import pytest

from benchmarks.policies.contest import measure, run
from benchmarks.policies.contestants import ALWAYS_REMOTE

from .lab import TINY


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
