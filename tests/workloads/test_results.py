"""The shared result: percentiles of counted values, and attainment by its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.types import Slo
from workloads.results import PromptTokens, RoundRecord, attainment, meets, percentiles, summarise

SLO = Slo(1.0, 0.1)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 6)), min_size=1, max_size=20))
def test_counted_values_have_the_percentiles_of_the_repeated_ones(drawn: list[tuple[float, int]]) -> None:
    values, counts = map(np.array, zip(*drawn, strict=True))
    assert percentiles(values, counts) == pytest.approx(percentiles(np.repeat(values, counts)))


records = st.builds(
    RoundRecord,
    session_id=st.sampled_from("abc"),
    index=st.integers(0, 3),
    sent_s=st.just(0.0),
    prompt=st.builds(PromptTokens, st.just(0), st.just(1)),
    ttft_s=st.sampled_from([0.5, 1.0, 1.5]),
    gaps_s=st.sampled_from([[], [0.05, 0.15], [0.2]]),
    error=st.sampled_from([None, None, "x"]),
)


@settings(max_examples=50)
@given(st.lists(records, max_size=12), st.dictionaries(st.sampled_from("abc"), st.integers(1, 5)))
def test_rounds_that_were_never_sent_count_as_missed(done: list[RoundRecord], planned: dict[str, int]) -> None:
    of = {name: [record for record in done if record.session_id == name] for name in "abc"}
    due = sum(max(len(found), planned.get(name, 0)) for name, found in of.items() if found)
    met = sum(meets(record, SLO) for record in done)
    whole = [name for name, count in planned.items() if sum(meets(record, SLO) for record in of[name]) == count]
    reached = attainment(done, planned, SLO)
    assert reached.rounds == (met / due if due else 0.0)
    assert reached.sessions == (len(whole) / len(planned) if planned else 0.0)


def test_a_round_meets_both_targets_exactly_or_it_does_not() -> None:
    def round_(ttft_s: float | None, *gaps_s: float, error: str | None = None) -> RoundRecord:
        return RoundRecord("s", 0, 0.0, PromptTokens(0, 1), ttft_s=ttft_s, gaps_s=list(gaps_s), error=error)

    assert meets(round_(1.0, 0.05, 0.15), SLO)
    assert meets(round_(1.0), SLO)
    assert not meets(round_(1.01), SLO)
    assert not meets(round_(0.5, 0.1, 0.11), SLO)
    assert not meets(round_(0.5, error="x"), SLO)
    assert not meets(round_(None), SLO)


def test_without_targets_nothing_is_attained() -> None:
    assert summarise([], {"a": 1}, None, 1.0)["attainment"] == {"rounds": None, "sessions": None}


def test_unsent_rounds_of_failed_sessions_are_missed_and_unended_sessions_do_not_count() -> None:
    ok = RoundRecord("a", 0, 0, PromptTokens(0, 1), 1, 0.1, [], 0.1)
    failed = RoundRecord("b", 0, 0, PromptTokens(0, 1), error="x")
    running = RoundRecord("c", 0, 0, PromptTokens(0, 1), 1, 0.1, [], 0.1)
    result = summarise([ok, failed, running], {"a": 1, "b": 4}, SLO, 1.0)
    assert result["attainment"] == {"rounds": 2 / 6, "sessions": 0.5}


def test_rounds_have_percentiles_of_their_mean_gap_beside_those_of_single_gaps() -> None:
    gaps_s: tuple[list[float], ...] = ([0.01] * 9 + [0.2], [0.02, 0.02], [])
    done = [RoundRecord("a", n, 0.0, PromptTokens(0, 1), ttft_s=0.5, gaps_s=each) for n, each in enumerate(gaps_s)]
    result = summarise(done, {"a": 3}, SLO, 1.0)
    assert result["mean_itl_s"]["p50"] == pytest.approx((0.029 + 0.02) / 2)
    assert result["mean_itl_s"]["p95"] < 0.03 < result["itl_s"]["p95"]
