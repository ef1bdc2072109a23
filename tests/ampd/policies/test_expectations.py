"""A routing that predicts its ordering wrongly is named."""

import pytest

from ampd.policies.expectations import disagreement


@pytest.mark.parametrize(
    ("routing", "ordering"),
    [
        ("predictive", "on-time"),
        ("predictive(headroom=0.9)", "on-time(headroom=0.9, late_share=0)"),
        ("predictive(headroom=0.9)", "fcfs"),
        ("always-local", "on-time(headroom=0.9)"),
    ],
)
def test_policies_that_fit_together_bring_no_line(routing: str, ordering: str) -> None:
    assert disagreement(routing, ordering) is None


@pytest.mark.parametrize(
    ("routing", "ordering", "words"),
    [
        ("predictive(headroom=0.9)", "on-time", ["headroom 0.9 and 0.95", "the same headroom"]),
        ("predictive", "on-time(missed_weight=1)", ["missed_weight 0.5 and 1", "the same missed_weight"]),
        ("predictive(headroom=1)", "on-time(missed_weight=1)", ["the same headroom and missed_weight"]),
    ],
)
def test_values_that_differ_are_named(routing: str, ordering: str, words: list[str]) -> None:
    line = disagreement(routing, ordering)
    assert line is not None
    assert all(word in line for word in (f"--routing {routing}", f"--ordering {ordering}", *words))
