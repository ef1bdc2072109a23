"""The tables of what the coordinator costs."""

from __future__ import annotations

from benchmarks.overhead_tables import aims, cpu, times


def test_cpu_times_have_a_column_for_each_graph() -> None:
    each = {"token_us": 10.4, "round_us": 2000.0}
    names = ("worker-with-4", "coordinator-with-4", "coordinator-with", "worker-without", "coordinator-pipe")
    names = (*names, "status_relay-status", "coordinator-status")
    lines = cpu({"commit": "c", "concurrency_32": dict.fromkeys(names, each)}).splitlines()
    assert lines[2].startswith(
        "| per token | frontend -> worker | the pipe | N = 1 | N = 4 | a coordinator and the status "
    )
    assert lines[4:8] == [
        "| coordinator | - | 10 | 10 | 10 | 10 |",
        "| worker | 10 | - | - | 10 | - |",
        "| status relay | - | - | - | - | 10 |",
        "| all | 10 | 10 | 10 | 21 | 21 |",
    ]
    assert lines[-1] == "| all | 2,000 | 2,000 | 2,000 | 4,000 | 4,000 |"


PLAIN = {"ttft_s": 0.002, "total_s": 0.004, "requests_per_s": 200.0}
SLOW = {"ttft_s": 0.005, "total_s": 0.008, "requests_per_s": 100.0}


def test_times_are_compared_with_those_without_a_coordinator() -> None:
    rows = times({"times_1": {"with": SLOW, "pipe": SLOW, "without": PLAIN}, "prompt_tokens": 9}).splitlines()[2:]
    assert rows == [
        "| 1 client(s): frontend -> worker | 2.00 ms (1.00) | 4.00 ms (1.00) | 200 (1.00) |",
        "| 1 client(s): the pipe | 5.00 ms (2.50) | 8.00 ms (2.00) | 100 (0.50) |",
        "| 1 client(s): N = 1 | 5.00 ms (2.50) | 8.00 ms (2.00) | 100 (0.50) |",
    ]


def test_the_aims_count_all_processes_of_a_graph() -> None:
    figures = {
        "coordinator-with": {"token_us": 1.0, "round_us": 500.0},
        "worker-with": {"token_us": 9.0, "round_us": 1500.0},
        "worker-without": {"token_us": 10.0, "round_us": 0.0},
    }
    results = {"times_16": {"with": SLOW, "without": PLAIN}, "concurrency_16": figures, "long_tokens": 200}
    assert aims(results).splitlines()[2:] == ["| 16 client(s): N = 1 | 2.50 | 0.50 | 2.00 | 1.0 us | 500 us |"]
