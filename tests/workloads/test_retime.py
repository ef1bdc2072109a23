"""New arrivals: a seeded Poisson process over repeated sessions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.errors import UserError
from workloads.trace import Round, Session, retime


def _trace(count: int) -> list[Session]:
    only = (Round(incr_tokens=3, output_tokens=1),)
    return [Session(session_id=f"s{n}", arrival_s=100.0 + n, rounds=only) for n in range(count)]


@given(st.integers(1, 7), st.floats(0.01, 50), st.integers(0, 99), st.none() | st.integers(1, 30))
def test_retiming_repeats_sessions_under_new_names(count: int, rate: float, seed: int, limit: int | None) -> None:
    timed = retime(_trace(count), rate, seed, limit)
    assert len(timed) == (limit or count)
    assert len({session.session_id for session in timed}) == len(timed)
    assert [session.session_id.partition("#")[0] for session in timed] == [f"s{n % count}" for n in range(len(timed))]
    assert timed[0].arrival_s == 0
    assert all(right.arrival_s >= left.arrival_s for left, right in pairwise(timed))
    assert timed == retime(_trace(count), rate, seed, limit)


def test_retimed_rate_is_the_wanted_one() -> None:
    timed = retime(_trace(3), 4.0, 7, 5000)
    assert 5000 / timed[-1].arrival_s == pytest.approx(4.0, rel=0.05)


def test_without_a_rate_arrivals_only_shift() -> None:
    assert [s.arrival_s for s in retime(_trace(5), None, 0, 3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("rate", "limit"), [(0.0, None), (-1.0, None), (float("nan"), None), (None, 0)])
def test_senseless_rates_and_limits_are_refused(rate: float | None, limit: int | None) -> None:
    with pytest.raises(UserError):
        retime(_trace(2), rate, 0, limit)
