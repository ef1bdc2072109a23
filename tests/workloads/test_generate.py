"""Generators match the means of the paper's table."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.trace_command import WORKLOADS, Lengths, generate

PAPER = {
    "toolbench": (3.96, 703.79, 50.39),
    "gaia": (11.32, 6161.02, 528.76),
    "hotpotqa": (3, 1569.8, 80.03),
    "dureader": (3, 3081.23, 150.10),
}


@pytest.mark.long
@pytest.mark.parametrize("name", list(PAPER))
@pytest.mark.parametrize("lengths", list(Lengths))
def test_means_are_the_papers(name: str, lengths: Lengths) -> None:
    rounds, prefill, output = PAPER[name]
    sessions = list(generate(name, 5_000, 2.0, 1, lengths))
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
