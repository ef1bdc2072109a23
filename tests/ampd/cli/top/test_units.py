"""Numbers in narrow columns: never wider than promised, and never saying more than is true."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.cli.top_screen import count, percent, printable, seconds

numbers = st.floats(0, 1e18)


@given(numbers)
def test_no_number_is_wider_than_its_column(value: float) -> None:
    assert len(seconds(value)) <= 6
    assert len(count(value)) <= 5


@given(st.floats(0, 1))
def test_a_share_is_narrow_and_all_means_all(share: float) -> None:
    assert len(percent(share)) <= 6
    assert (percent(share) == "100.0%") == (share == 1)


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (None, "-"),
        (0.0, "0.0ms"),
        (0.0004, "0.4ms"),
        (0.0123, "12ms"),
        (0.9994, "999ms"),
        (0.9996, "1.00s"),
        (9.996, "10.0s"),
        (99.96, "100s"),
        (9000.0, "9000s"),
        (10_000.0, "2.8h"),
    ],
)
def test_durations(value_s: float | None, text: str) -> None:
    assert seconds(value_s) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (9999, "9999"), (9999.6, "10.0k"), (99_960, "100k"), (999_600, "1.0M"), (2.5e9, "2.5G")],
)
def test_counts(value: float | None, text: str) -> None:
    assert count(value) == text


@given(st.text())
def test_words_of_strangers_cannot_move_the_cursor(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text)) == len(text)
