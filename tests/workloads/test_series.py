"""What charts are drawn from: right, and small however many rounds there were."""

from __future__ import annotations

import json

import pytest

from ampd.types import Slo
from workloads.report import PERCENTS, series_of
from workloads.results import PromptTokens, RoundRecord

SLO = Slo(1.0, 0.1)


def _round(number: int, sent_s: float, ttft_s: float = 1.0, e2e_s: float = 2.0, output_tokens: int = 10) -> RoundRecord:
    gaps_s = [0.05] * (output_tokens - 1)
    return RoundRecord(f"s{number}", 0, sent_s, PromptTokens(80, 20), output_tokens, ttft_s, gaps_s, e2e_s)


def test_tokens_are_spread_from_the_first_to_the_last_and_rounds_over_their_time() -> None:
    course = series_of([_round(0, 0.0, 1.0, 2.0), _round(1, 10.0, 1.0, 10.0, 90)], SLO)["course"]
    assert course["step_s"] == 1.0
    assert course["output_tokens_per_s"][:3] == [0.0, 10.0, 0.0]
    assert course["output_tokens_per_s"][10:20] == [0.0, *[10.0] * 9]
    assert course["rounds_in_flight"][:3] == [1.0, 1.0, 0.0]
    assert course["sessions_in_flight"] == course["rounds_in_flight"]
    assert sum(course["input_tokens_per_s"]) == 200.0
    assert sum(course["rounds_per_s"]) == sum(course["goodput_rounds_per_s"]) == 2.0


def test_a_session_is_in_flight_between_its_rounds() -> None:
    second = RoundRecord("s0", 1, 8.0, PromptTokens(1, 1), 2, 0.5, [0.5], 2.0)
    course = series_of([_round(0, 0.0), second], None)["course"]
    steps = round(10 / course["step_s"])
    assert course["sessions_in_flight"][:steps] == pytest.approx([1.0] * steps)
    assert course["rounds_in_flight"][round(4 / course["step_s"])] == 0.0
    assert "goodput_rounds_per_s" not in course


def test_percentiles_are_in_the_named_order() -> None:
    series = series_of([_round(number, 0.0, number + 1.0, 500.0) for number in range(201)], SLO)
    ttft = dict(zip(PERCENTS, series["percentiles"]["ttft_initial_s"], strict=True))
    assert (ttft[0], ttft[50], ttft[100], ttft[99.5]) == (1.0, 101.0, 201.0, 200.0)
    assert series["percentiles"]["ttft_incremental_s"] == []
    assert series["missed_in_all"] == 200
    assert len(series["missed"]) == 100


def test_its_size_does_not_depend_on_the_rounds() -> None:
    few, many = (len(json.dumps(series_of([_round(n, n / 3) for n in range(count)], SLO))) for count in (2000, 20000))
    assert many < 1.2 * few < 120_000


def test_nothing_is_fine_too() -> None:
    series = series_of([RoundRecord("a", 0, 0.0, PromptTokens(1, 1), error="e" * 1000)], SLO)
    assert series["course"] == {}
    assert series["errors"] == [["e" * 300, 1]]
    assert series["sample"] == [["a", 0, 0.0, None, None, "error", False]]
