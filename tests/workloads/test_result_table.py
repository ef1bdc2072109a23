"""The table of a result: dashes where nothing is known, and the most frequent errors."""

from __future__ import annotations

from ampd.types import Slo
from workloads.report import figures_table
from workloads.results import PromptTokens, RoundRecord, error_lines, headline, summarise

SLO = Slo(1.0, 0.1)


def test_the_figures_are_a_table() -> None:
    decision = {"route": "remote", "kv_read_bytes_history": 2048, "kv_read_bytes_increment": 0}
    record = RoundRecord(
        "s", 0, 0.0, PromptTokens(0, 1), output_tokens=2, ttft_s=0.25, gaps_s=[0.05], e2e_s=0.3, decision=decision
    )
    result = summarise([record], {"s": 1}, SLO, 2.0)
    assert headline(result) == "1 session, 1 round, 2 tokens generated in 2.0 s, 0 errors"
    rows = [line.split("  ") for line in figures_table({"replay": result}).splitlines()]
    cells = {row[0]: row[-1].strip() for row in rows[1:]}
    assert cells["rounds within both targets"] == "100.0%"
    assert cells["TTFT P95, ms"] == "250.0"
    assert cells["prefilled locally"] == "0.0%"


def test_the_most_frequent_errors_come_first_and_the_rest_is_counted() -> None:
    errors = [f"rare {number}" for number in range(30)] + ["often"] * 3
    shown = [line for line in error_lines(errors) if line.startswith("error  ")]
    assert shown[0] == "error               3 x often"
    assert error_lines(errors)[-1].strip() == f"and {31 - len(shown)} other messages"


def test_sessions_that_do_not_fit_are_one_line_with_the_number_and_the_limit() -> None:
    errors = [
        f"HTTP 400: prompt is too long: {tokens} tokens; the maximum context length is 40960 tokens (prompt and output "
        "together); send a shorter prompt"
        for tokens in (41_000, 59_317, 50_000)
    ]
    (line,) = [line for line in error_lines(errors) if line.startswith("error  ")]
    assert line == (
        "error               3 x sessions do not fit: the longest prompt has 59317 tokens, the longest context is 40960"
    )
