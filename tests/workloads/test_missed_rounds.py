"""Which rounds missed their targets, when, and why."""

import pytest

from ampd.types import Slo
from workloads.results import PromptTokens, RoundRecord, missed_rounds

SLO = Slo(0.5, 0.05)
DECISION = {
    "route": "remote",
    "reason": "earliest",
    "incr_tokens": 1200,
    "ttft_s": 0.9,
    "queued_s": 0.2,
    "prefill_s": 0.6,
    "kv_read_s_history": 0.01,
    "kv_read_s_increment": 0.15,
    "hit_tokens": {"recomputed": 64},
    "retries": 1,
}


def _round(sent_s: float, ttft_s: float | None = 0.1, gap_s: float = 0.01, **fields: object) -> RoundRecord:
    gaps_s = [] if ttft_s is None else [gap_s] * 10
    end_s = None if ttft_s is None else ttft_s + sum(gaps_s)
    return RoundRecord("s", 3, sent_s, PromptTokens(10, 5), 11, ttft_s, gaps_s, end_s, **fields)  # type: ignore[arg-type]


def test_met_rounds_are_left_out_and_the_others_are_in_the_order_of_sending() -> None:
    missed = missed_rounds([_round(7, 0.6), _round(1), _round(2, None, error="503 no worker")], SLO)
    assert [(round_.sent_s, round_.targets) for round_ in missed] == [
        (2, "failed: 503 no worker"),
        (7, "TTFT 600 ms of 500 ms"),
    ]


def test_a_late_token_is_named() -> None:
    (missed,) = missed_rounds([_round(1, 0.25, 0.125)], SLO)
    assert missed.targets == "ITL 125.0 ms of 50 ms"
    (both,) = missed_rounds([_round(1, 0.75, 0.125)], SLO)
    assert both.targets == "TTFT 750 ms of 500 ms, ITL 125.0 ms of 50 ms"


def test_the_parts_of_the_time_are_named_longest_first_without_small_ones() -> None:
    (missed,) = missed_rounds([_round(1, 0.9, decision=DECISION)], SLO)
    parts = "prefill of 1,200 tokens 600 ms; queued 200 ms; KV reads 160 ms"
    assert missed.causes == f"remote (earliest); {parts}; 64 tokens of the history recomputed; 1 workers lost"


@pytest.mark.parametrize("decision", [{}, {"route": "local", "queued_s": None, "hit_tokens": None}])
def test_a_server_may_report_nothing(decision: dict[str, object]) -> None:
    (missed,) = missed_rounds([_round(1, 0.9, decision=decision)], SLO)
    assert missed.causes == ("local (-)" if decision else "")


def test_a_server_may_report_other_kinds_of_values() -> None:
    decision = {"route": "local", "incr_tokens": "9", "hit_tokens": [3], "retries": "x", "prefill_s": 0.9}
    (missed,) = missed_rounds([_round(1, 0.9, decision=decision)], SLO)
    assert missed.causes == "local (-); prefill of 0 tokens 900 ms"
    (missed,) = missed_rounds([_round(1, 0.9, decision={"route": "local", "hit_tokens": {"recomputed": "x"}})], SLO)
    assert missed.causes == "local (-)"
