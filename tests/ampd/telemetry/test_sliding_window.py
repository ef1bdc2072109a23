"""The sliding window, against a list that is searched anew each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.telemetry.windows import SlidingWindow
from ampd.types import Window

LENGTH_S = 10.0

steps = st.lists(
    st.tuples(
        st.integers(0, 40).map(lambda eighths: eighths / 8),  # seconds since the step before
        st.floats(0, 100),  # sample
        st.integers(1, 50),  # how many samples it stands for
    ),
    max_size=60,
)


@given(steps)
def test_it_is_the_mean_of_what_is_younger_than_its_length(steps: list[tuple[float, float, int]]) -> None:
    window, samples, now_s = SlidingWindow(LENGTH_S), [], 0.0
    for passed_s, value_s, count in steps:
        now_s += passed_s
        window.add(value_s, now_s, count)
        samples.append((now_s, value_s, count))
        young = [(value, count) for at_s, value, count in samples if at_s > now_s - LENGTH_S]
        total = sum(count for _, count in young)
        read = window.read(now_s)
        assert read.count == total
        assert read.mean_s == pytest.approx(sum(value * count for value, count in young) / total, abs=1e-8)
    assert window.read(now_s + LENGTH_S) == Window()


def test_an_empty_window_is_zero() -> None:
    assert SlidingWindow().read(5.0) == Window(0.0, 0)


def test_a_huge_sample_leaves_no_trace() -> None:
    window = SlidingWindow(LENGTH_S)
    window.add(1e9, 0.0)
    window.add(0.001, 5.0)
    assert window.read(10.0) == Window(0.001, 1)


def test_a_clock_that_steps_back_revives_nothing() -> None:
    window = SlidingWindow(LENGTH_S)
    window.add(1.0, 0.0)
    assert window.read(20.0) == Window()
    window.add(2.0, 3.0)
    assert window.read(4.0) == Window(2.0, 1)
    assert window.read(29.9) == Window(2.0, 1)
    assert window.read(30.0) == Window()


def test_no_samples_are_no_samples() -> None:
    window = SlidingWindow()
    window.add(1.0, 0.0, count=0)
    assert window.read(0.0) == Window()
