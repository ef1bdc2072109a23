"""The tables of what the coordinator costs."""

from __future__ import annotations

from benchmarks.overhead_tables import cpu, times


def test_cpu_times_have_a_column_for_each_graph() -> None:
    each = {"token_us": 10.4, "round_us": 2000.0}
    names = ("worker-with-4", "coordinator-with-4", "coordinator-with", "worker-without", "relay-relay")
    names = (*names, "status_relay-status", "coordinator-status")
    lines = cpu({"commit": "c", "concurrency_32": dict.fromkeys(names, each)}).splitlines()
    assert lines[2].startswith(
        "| per token | frontend -> worker | a relay | N = 1 | N = 4 | a coordinator and the status "
    )
    assert lines[4:8] == [
        "| coordinator (or relay) | - | 10 | 10 | 10 | 10 |",
        "| worker | 10 | - | - | 10 | - |",
        "| status relay | - | - | - | - | 10 |",
        "| all | 10 | 10 | 10 | 21 | 21 |",
    ]
    assert lines[-1] == "| all | 2,000 | 2,000 | 2,000 | 4,000 | 4,000 |"


def test_times_are_compared_with_those_without_a_coordinator() -> None:
    plain = {"ttft_s": 0.002, "total_s": 0.004, "requests_per_s": 200.0}
    slow = {"ttft_s": 0.005, "total_s": 0.008, "requests_per_s": 100.0}
    ratio = {"ttft_s": 1.1, "total_s": 1.2, "requests_per_s": 0.9}
    figures = {"with": slow, "relay": slow, "status": slow, "without": plain, "ratio": plain, "status_ratio": ratio}
    rows = times({"concurrency_1": figures, "prompt_tokens": 9}).splitlines()[2:]
    assert rows == [
        "| 1 client(s): frontend -> worker | 2.00 ms | 4.00 ms | 200 |",
        "| with a coordinator, N = 1 | 5.00 ms (2.50) | 8.00 ms (2.00) | 100 (0.50) |",
        "| with a relay | 5.00 ms (2.50) | 8.00 ms (2.00) | 100 (0.50) |",
        "| with a coordinator and the status relay | 5.00 ms (1.10) | 8.00 ms (1.20) | 100 (0.90) |",
    ]
