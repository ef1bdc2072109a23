"""The gaps between tokens, kept as runs of steps, have the percentiles of the single gaps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.simulator.outcome import GapRun, gap_percentiles
from workloads.results import percentiles

gap_runs = st.builds(GapRun, st.floats(0.001, 0.5), st.floats(0, 0.01), st.integers(1, 40), st.integers(1, 5))


@settings(max_examples=30)
@given(st.lists(gap_runs, max_size=6))
def test_runs_have_the_percentiles_of_their_gaps(runs: list[GapRun]) -> None:
    gaps_s = [run.first_s + step * run.growth_s for run in runs for step in range(run.steps) for _ in range(run.batch)]
    assert gap_percentiles(runs) == pytest.approx(percentiles(gaps_s))
