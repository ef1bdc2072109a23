"""Generators match the paper's table; new arrivals are a seeded Poisson process."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.errors import UserError
from workloads.generate import WORKLOADS, Lengths, generate
from workloads.retime import retime
from workloads.trace import Round, Session

PAPER = {
    "toolbench": (3.96, 703.79, 50.39),
    "gaia": (11.32, 6161.02, 528.76),
    "hotpotqa": (3, 1569.8, 80.03),
    "dureader": (3, 3081.23, 150.10),
}


@pytest.mark.parametrize("name", list(PAPER))
@pytest.mark.parametrize("lengths", list(Lengths))
def test_means_are_the_papers(name: str, lengths: Lengths) -> None:
    rounds, prefill, output = PAPER[name]
    sessions = list(generate(name, 20_000, 2.0, 1, lengths))
    factor = 1 if lengths is Lengths.PER_SESSION else rounds
    assert fmean(len(s.rounds) for s in sessions) == pytest.approx(rounds, rel=0.02)
    assert fmean(sum(r.incr_tokens for r in s.rounds) for s in sessions) == pytest.approx(prefill * factor, rel=0.03)
    assert fmean(sum(r.output_tokens for r in s.rounds) for s in sessions) == pytest.approx(output * factor, rel=0.03)
    assert len(sessions) / sessions[-1].arrival_s == pytest.approx(2.0, rel=0.03)
    tool = fmean(r.tool_s for s in sessions for r in s.rounds[1:])
    assert tool == pytest.approx(WORKLOADS[name].mean_tool_s, rel=0.05)


@given(st.sampled_from(list(PAPER)), st.integers(0, 1000), st.sampled_from(list(Lengths)))
def test_the_seed_decides(name: str, seed: int, lengths: Lengths) -> None:
    first, again = (list(generate(name, 5, 1.0, seed, lengths)) for _ in range(2))
    assert first == again
    assert first != list(generate(name, 5, 1.0, seed + 1, lengths))
    assert list(generate(name, 3, 1.0, seed, lengths)) == first[:3]


def test_no_tool_time_on_request() -> None:
    assert all(r.tool_s == 0 for s in generate("gaia", 20, 1.0, 0, Lengths.PER_SESSION, 0.0) for r in s.rounds)


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
