"""What is made of the memory of processes that was read; the measurement itself needs a graph."""

import os

import pytest

from benchmarks.waiting_memory import memory, rows, table

MIB = 1 << 20


def test_a_round_costs_the_slope_and_all_rounds_are_compared_with_the_limit() -> None:
    seen = [{"coordinator": 60 * MIB, "frontend": 42 * MIB}, {"coordinator": 80 * MIB, "frontend": 82 * MIB}]
    coordinator, frontend = rows([10, 50], seen)
    assert coordinator["per_round_mib"] == 0.5
    assert coordinator["idle_mib"] == 55
    assert coordinator["with_all_mib"] == 55 + 0.5 * 1024
    assert frontend["rounds"] == 2 * 1024, "those of both coordinators"
    assert frontend["with_all_mib"] == 32 + 2048
    assert {row["limit_mib"] for row in (coordinator, frontend)} == {4096}
    text = table({"tokens": 100_000, "rows": [coordinator, frontend]})
    assert "| frontend | 32 | 1.00 | 2,048 | 2,080 | 4,096 |" in text


def test_only_processes_of_the_graph_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.waiting_memory.graph_processes", lambda: [("coordinator", os.getpid())])
    assert memory()["coordinator"] > MIB
