"""A load beside a step that still writes its pages, in every order in which a GPU may run the two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.waiting import PATIENCE_S
from workers.kv.ranks import copies as product
from workers.kv.ranks.copies import Load, PageLoader

LAYERS = 3


@dataclass(frozen=True, eq=False)
class Operation:
    """Something that the GPU does, and what has ended before it begins."""

    act: Callable[[], None]
    after: frozenset[Operation]


class Cuda:
    """In place of `torch.cuda`: notes operations with what must come before them, which is nothing else than

    - the operation before on its stream, and what the stream was told to wait for;
    - what the thread that launched it had waited for.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._of_thread = threading.local()
        cuda = self

        class Stream:
            def __init__(self) -> None:
                self.last: frozenset[Operation] = frozenset()

            def synchronize(self) -> None:
                cuda.seen |= self.last

        class Event:
            def record(self, stream: Any = None) -> None:
                self._after = (stream or cuda.current).last

            def synchronize(self) -> None:
                cuda.seen |= self._after

        self.Stream, self.Event = Stream, Event

    @property
    def seen(self) -> frozenset[Operation]:
        """The operations that this thread knows to have ended."""
        return getattr(self._of_thread, "seen", frozenset())

    @seen.setter
    def seen(self, operations: frozenset[Operation]) -> None:
        self._of_thread.seen = operations

    @property
    def current(self) -> Any:
        return self._of_thread.__dict__.setdefault("stream", self.Stream())

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._of_thread.stream = self.current, stream
        yield
        self._of_thread.stream = before

    def launch(self, act: Callable[[], None]) -> None:
        """Put an operation on the current stream."""
        operation = Operation(act, self.current.last | self.seen)
        self.current.last = frozenset({operation})
        self.operations.append(operation)


def orders(left: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Every order in which these operations may run."""
    if not left:
        yield []
    for operation in left:
        if not operation.after.intersection(left):
            rest = [other for other in left if other is not operation]
            yield from ([operation, *order] for order in orders(rest))


class Rank:
    """The reader, the link and the counter of a rank with one page, whose KV of each layer is a word."""

    def __init__(self, cuda: Cuda) -> None:
        self.page = [""] * LAYERS
        self.read = [""] * LAYERS
        self.loaded_layers: Queue[Any] = Queue()
        self._cuda = cuda

    def write(self, layer: int, word: str) -> None:
        self._cuda.launch(lambda: self.page.__setitem__(layer, word))

    def look(self, layer: int) -> None:
        self._cuda.launch(lambda: self.read.__setitem__(layer, self.page[layer]))

    def load(self, _load: Load) -> Iterator[int]:
        for layer in range(LAYERS):
            self.write(layer, "loaded")
            yield layer

    def complete(self, _index: int, _layer: int) -> None:
        self.loaded_layers.put(self._cuda.seen)

    def fail(self, _index: int, error: BaseException) -> None:
        self.loaded_layers.put(error)

    def begin_load(self, _rid: str) -> None: ...

    def loaded(self, _rids: list[str], _seconds: float) -> None: ...

    def update_producer(self) -> int:
        return 0


def outcomes(monkeypatch: pytest.MonkeyPatch, step_on: str, told: str) -> list[bool]:
    """Whether the page is right at the end, and was when the prefill read it, in each order.

    A request has ended, and its page is free and loaded for another one. A step that was launched before still writes
    the page. The scheduler's stream has waited for the beginning of the step.

    Args:
        step_on: the stream of the step, `scheduler` or `forward`.
        told: the stream of the forward that the loader is told.
    """
    cuda = Cuda()
    monkeypatch.setattr(product, "torch", SimpleNamespace(cuda=cuda))
    rank: Any = Rank(cuda)
    streams = {"scheduler": cuda.current, "forward": cuda.Stream(), "another": cuda.Stream()}
    loader = PageLoader(rank, rank, rank, on_gpu=True, forward_stream=streams[told])
    with cuda.stream(streams[step_on]):
        cuda.launch(lambda: None)
        begun = cuda.current.last
        for layer in range(LAYERS):
            rank.write(layer, "late")
    streams["scheduler"].last |= begun
    loader.queue("r", {"kv": ([0], [0])})
    loader.start()
    streams["forward"].last |= streams["scheduler"].last
    with cuda.stream(streams["forward"]):
        for layer in range(LAYERS):
            seen = rank.loaded_layers.get(timeout=PATIENCE_S)
            assert isinstance(seen, frozenset), seen
            cuda.seen |= seen
            rank.look(layer)
    loader.close()
    right = []
    for order in orders(cuda.operations):
        for operation in order:
            operation.act()
        right.append(rank.page == rank.read == ["loaded"] * LAYERS)
    return right


@pytest.mark.parametrize("step_on", ["forward", "scheduler"])
def test_in_no_order_does_a_step_overwrite_a_load(monkeypatch: pytest.MonkeyPatch, step_on: str) -> None:
    assert all(outcomes(monkeypatch, step_on, told="forward"))


def test_a_load_that_waits_for_another_stream_is_overwritten_in_some_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the orders are there."""
    right = outcomes(monkeypatch, "forward", told="another")
    assert 0 < right.count(False) < len(right)
