"""Every rank of an engine on a CPU has its cores."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tests.harness.cpu_ranks import cores_of_ranks, divide_cores


@pytest.mark.parametrize(
    ("cores", "ranks", "text"),
    [
        ([0, 1], 2, "0|1"),
        ([0, 1], 4, "0|1|0|1"),
        ([0, 2, 5, 6, 7], 2, "0,2|5,6,7"),
        (range(8), 4, "0,1|2,3|4,5|6,7"),
        ([3], 1, "3"),
    ],
)
def test_every_core_belongs_to_one_rank_while_there_are_enough(cores: Sequence[int], ranks: int, text: str) -> None:
    assert cores_of_ranks(cores, ranks) == text


def test_ranks_get_cores_only_where_the_user_gave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "4|5")
    divide_cores(numa_index=0, world_size=2)
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5"
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND")
    divide_cores(numa_index=0, world_size=1)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "")  # so that it is restored
    del os.environ["SGLANG_CPU_OMP_THREADS_BIND"]
    divide_cores(numa_index=1, world_size=3)
    assert len(os.environ["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 3
