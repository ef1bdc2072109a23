"""Sampling options that leave an engine no token to choose."""

from __future__ import annotations

from typing import Any

import pytest

from ampd.sampling_limits import LEAST_REPETITION_PENALTY, MOST_FORBIDDEN_STOPS, beyond_sampling

TOO_MANY = list(range(MOST_FORBIDDEN_STOPS + 1))


@pytest.mark.parametrize("penalty", [1e-40, 0, -1.0, LEAST_REPETITION_PENALTY / 2])
def test_a_penalty_that_makes_logits_infinite_is_refused(penalty: float) -> None:
    reason = beyond_sampling({"sampling_options": {"repetition_penalty": penalty}})
    assert reason == f"repetition_penalty must be at least 0.01 (given: {penalty!r})"


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "0.5", [0.5], True])
def test_an_option_that_is_no_number_is_refused(name: str, value: Any) -> None:
    reason = beyond_sampling({"sampling_options": {name: value}})
    assert reason == f"{name} must be a number (given: {value!r:.32})"


def test_stop_tokens_that_forbid_the_vocabulary_are_refused() -> None:
    parts = {"stop_token_ids": TOO_MANY[:40], "stop_token_ids_hidden": TOO_MANY[30:], "min_tokens": 1}
    for stops in ({"stop_token_ids": TOO_MANY, "min_tokens": 4}, parts):
        reason = beyond_sampling({"stop_conditions": stops})
        assert reason == "with min_tokens, at most 64 stop_token_ids are allowed (given: 65)"


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"sampling_options": None, "stop_conditions": None},
        {"sampling_options": {"repetition_penalty": None}},
        {"sampling_options": {"repetition_penalty": LEAST_REPETITION_PENALTY}},
        {"stop_conditions": {"stop_token_ids": TOO_MANY}},
        {"stop_conditions": {"stop_token_ids": TOO_MANY, "min_tokens": 0}},
        {"stop_conditions": {"stop_token_ids": TOO_MANY[1:], "min_tokens": 4}},
        {"stop_conditions": {"stop_token_ids_hidden": TOO_MANY, "min_tokens": 4}, "eos_token_ids": [7]},
    ],
)
def test_other_requests_are_served(request_: dict[str, Any]) -> None:
    assert beyond_sampling(request_) is None
