"""Pinning of the store for the GPU: a driver that refuses it costs speed, and nothing else."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from workers.kv.rank_process.pinning import pin  # noqa: E402


class Cudart:
    """The driver's answer, where there is no GPU."""

    def __init__(self, result: int) -> None:
        self._result = result
        self.asked: list[tuple[int, int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.asked.append((address, size, flags))
        return self._result


@pytest.mark.parametrize(("result", "warnings"), [(0, 0), (2, 1)])
def test_memory_that_is_not_pinned_is_one_warning(monkeypatch: pytest.MonkeyPatch, result: int, warnings: int) -> None:
    cudart, store = Cudart(result), torch.zeros(4096, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    lines = pin(store)
    assert cudart.asked == [(store.data_ptr(), 4096, 0)]
    assert len(lines) == warnings
    assert all("error 2" in line and "ulimit -l" in line and "\n" not in line for line in lines)
