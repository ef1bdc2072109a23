"""The window over runs of steps against the window over single tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.telemetry.windows import SlidingWindow
from planner.simulator.decode_batch import GapWindow, steps_s
from planner.simulator.outcome import GapRun

runs = st.lists(
    st.tuples(st.floats(0.001, 0.4), st.floats(0, 0.01), st.integers(1, 30), st.integers(1, 5), st.floats(0, 3)),
    max_size=20,
)


@settings(deadline=None)
@given(runs, st.lists(st.floats(0, 4), min_size=1, max_size=6))
def test_the_window_of_runs_reads_like_the_window_of_tokens(
    given_runs: list[tuple[float, float, int, int, float]], pauses_s: list[float]
) -> None:
    ours, theirs = GapWindow(2.0), SlidingWindow(2.0)
    now_s = 0.0
    for first_s, growth_s, steps, batch, pause_s in given_runs:
        entry = GapRun(first_s, growth_s, steps, batch)
        start_s = now_s
        for step in range(steps):
            gap_s = first_s + step * growth_s
            now_s = start_s + steps_s(first_s, growth_s, step + 1)
            theirs.add(gap_s, now_s, batch)
        ours.add(start_s + first_s, entry)
        _assert_alike(ours, theirs, now_s)
        now_s += pause_s
        _assert_alike(ours, theirs, now_s)
    for pause_s in pauses_s:
        now_s += pause_s
        _assert_alike(ours, theirs, now_s)


def _assert_alike(ours: GapWindow, theirs: SlidingWindow, now_s: float) -> None:
    # A hair later, so that no sample leaves at this very moment, which rounding would decide.
    each, other = ours.read(now_s + 1.3e-7), theirs.read(now_s + 1.3e-7)
    assert each.count == other.count
    assert each.mean_s == pytest.approx(other.mean_s, rel=1e-6, abs=1e-8)


def test_an_unfinished_run_counts_as_far_as_it_has_come() -> None:
    window = GapWindow(10.0)
    window.add(1.0, GapRun(1.0, 0.0, 1, 1))
    seen = window.read(3.0, ((2.0, GapRun(0.5, 0.0, 2, 3)),))
    assert (seen.count, seen.mean_s) == (7, pytest.approx(4.0 / 7))
