"""Loads on a GPU: their stream belongs to the rank's device, which SGLang sets in the scheduler's thread alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from workers.kv.rank_process.page_loader import Load, PageLoader  # noqa: E402


class Rank:
    """What a loader works with: the reader, the link and the counter of a rank, which note what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def load(self, _load: Load) -> Iterator[int]:
        yield from (0, 1)

    def begin_load(self, _rid: str) -> None: ...

    def loaded(self, rids: list[str], _seconds: float) -> None:
        self.events.append(f"loaded {rids}")

    def update_producer(self) -> int:
        return 7

    def complete(self, index: int, layer: int) -> None:
        self.events.append(f"load {index} layer {layer}")

    def fail(self, _index: int, error: BaseException) -> None:
        self.events.append(repr(error))


def test_a_layer_counts_as_loaded_when_the_ranks_own_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of_thread = threading.local()  # as in CUDA, where each thread begins with device 0
    of_thread.device = 1
    rank: Any = Rank()

    class Stream:
        def __init__(self) -> None:
            self.device = getattr(of_thread, "device", 0)

        def synchronize(self) -> None:
            rank.events.append(f"device {self.device}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    loader = PageLoader(rank, rank, rank, on_gpu=True)
    loader.queue("r", {"kv": ([0], [0])})
    assert loader.start() == 7
    loader.close()
    assert rank.events == ["device 1", "load 7 layer 0", "device 1", "load 7 layer 1", "loaded ['r']"]
