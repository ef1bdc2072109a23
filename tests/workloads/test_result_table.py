"""The table of a result: dashes where nothing is known, and the most frequent errors."""

from __future__ import annotations

from ampd.types import Slo
from workloads.results import PromptTokens, RoundRecord, format_result, summarise

SLO = Slo(1.0, 0.1)


def lines_of(records: list[RoundRecord], slo: Slo | None, errors: list[str]) -> list[str]:
    planned = {record.session_id: 1 for record in records}
    return format_result(summarise(records, planned, slo, 2.0), errors).splitlines()


def test_what_is_not_known_is_a_dash() -> None:
    lines = lines_of([], None, [])
    assert "SLO attainment      - (give --ttft and --itl)" in lines
    assert "routes              - (the endpoint reports no routes)" in lines
    (ttft,) = [line for line in lines if line.startswith("TTFT")]
    assert ttft.split()[1:] == ["-"] * 4


def test_latencies_are_in_milliseconds_and_shares_are_named() -> None:
    decision = {"route": "remote", "kv_read_bytes_history": 2048, "kv_read_bytes_increment": 0}
    record = RoundRecord(
        "s", 0, 0.0, PromptTokens(0, 1), output_tokens=2, ttft_s=0.25, gaps_s=[0.05], e2e_s=0.3, decision=decision
    )
    lines = lines_of([record], SLO, [])
    assert lines[0] == "1 session, 1 round, 2 tokens generated in 2.0 s, 0 errors"
    (ttft,) = [line for line in lines if line.startswith("TTFT")]
    assert ttft.split()[1:] == ["250.0"] * 4
    assert any("100.0% of rounds, 100.0% of sessions (TTFT 1000 ms, ITL 100 ms)" in line for line in lines)
    assert any("0 local (0%), 1 remote (100%)" in line for line in lines)


def test_the_most_frequent_errors_come_first_and_the_rest_is_counted() -> None:
    errors = [f"rare {number}" for number in range(30)] + ["often"] * 3
    shown = [line for line in lines_of([], None, errors) if line.startswith("error  ")]
    assert shown[0] == "error               3 x often"
    assert lines_of([], None, errors)[-1].strip() == f"and {31 - len(shown)} other messages"


def test_sessions_that_do_not_fit_are_one_line_with_the_number_and_the_limit() -> None:
    errors = [
        f"HTTP 400: prompt is too long: {tokens} tokens; the maximum context length is 40960 tokens (prompt and output "
        "together); send a shorter prompt"
        for tokens in (41_000, 59_317, 50_000)
    ]
    (line,) = [line for line in lines_of([], None, errors) if line.startswith("error  ")]
    assert line == (
        "error               3 x sessions do not fit: the longest prompt has 59317 tokens, the longest context is 40960"
    )
