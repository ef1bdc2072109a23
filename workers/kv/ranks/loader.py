"""Copies beside what the engine computes: loads, layer by layer, on a thread of their own, and writes on a stream."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from queue import Queue
from typing import Any, Protocol

import torch

from workers.kv.ranks.copies import RankCopies
from workers.kv.ranks.link import RankLink

log = logging.getLogger(__name__)

Load = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""By pool: slots on the device, and offsets in the store."""


class StoreReader(Protocol):
    """Copies this rank's part of pages out of the store."""

    def load(self, loads: Load) -> Iterator[int]:
        """Copy all pages, on the caller's stream. Yields each of the model's layers, in order."""
        ...


class LoadCounter(Protocol):
    """What SGLang waits on, layer by layer."""

    def update_producer(self) -> int: ...

    def complete(self, index: int, layer: int) -> None: ...

    def fail(self, index: int, error: BaseException) -> None: ...

    def finish(self, index: int) -> bool: ...


class PageLoader:
    """The loads of one rank: queued by request, started together for one forward pass.

    Made in the scheduler's thread: a stream belongs to the current device of the thread that makes it, and only there
    SGLang has set the rank's device.

    Args:
        link: protects the records of a request while they are read.
        forward_stream: on a GPU, the stream on which SGLang computes under its overlap schedule.
    """

    def __init__(
        self, reader: StoreReader, link: RankLink, counter: LoadCounter, *, on_gpu: bool, forward_stream: Any
    ) -> None:
        self._reader = reader
        self._link = link
        self._counter = counter
        self._stream = torch.cuda.Stream() if on_gpu else None
        self._forward_stream = forward_stream
        self._queued: dict[str, Load] = {}
        self._started: dict[int, list[str]] = {}
        self._jobs: Queue[tuple[int, dict[str, Load], list[Any]] | None] = Queue()
        self._thread = threading.Thread(target=self._run, name="ampd-kv-load", daemon=True)
        self._thread.start()

    def queue(self, rid: str, load: Load) -> None:
        """Queue a request's load."""
        self._link.begin_load(rid)
        self._queued[rid] = load

    def cancel(self, rid: str) -> bool:
        """Take a queued load back; False if there is none."""
        if self._queued.pop(rid, None) is None:
            return False
        self._link.end_load(rid)
        return True

    def start(self) -> int:
        """Start all queued loads. Returns the counter's index, or -1 if nothing is queued."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        index = self._counter.update_producer()
        self._started[index] = list(queued)
        self._jobs.put((index, queued, self._ready()))
        return index

    def finish(self, index: int) -> bool:
        """End the loads that were started under `index`; returns whether all of them have landed."""
        landed = self._counter.finish(index)
        for rid in self._started.pop(index, ()):
            self._link.end_load(rid)
        return landed

    def reset(self) -> None:
        """Forget queued loads and end started ones."""
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._started):
            self.finish(index)

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join(10.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            index, loads, ready = job
            try:
                for event in ready:
                    event.synchronize()
                started_s = time.perf_counter()
                self._copy(index, _merged(list(loads.values())))
                self._link.loaded(list(loads), time.perf_counter() - started_s)
            except BaseException as error:
                log.exception("KV load failed")
                self._counter.fail(index, error)

    def _copy(self, index: int, load: Load) -> None:
        stream = self._stream
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for layer in self._reader.load(load):
                if stream is not None:
                    stream.synchronize()
                self._counter.complete(index, layer)

    def _ready(self) -> list[Any]:
        """Events after which the slots may be written: what was launched before may still read and write them.

        A request that ends by a stop token or an abort gives its last page back while the next step, which was launched
        before the end was known, still writes a token into that page. The stream of this thread does not wait for the
        end of the step. It cannot take long, because the step needs nothing of the load.
        """
        if self._stream is None:
            return []
        events = [torch.cuda.Event(), torch.cuda.Event()]
        for event, stream in zip(events, (None, self._forward_stream), strict=True):  # None: the stream of this thread
            event.record(stream)
        return events


def _merged(loads: Sequence[Load]) -> Load:
    merged: dict[str, tuple[list[int], list[int]]] = {}
    for load in loads:
        for pool, (slots, offsets) in load.items():
            all_slots, all_offsets = merged.setdefault(pool, ([], []))
            all_slots += slots
            all_offsets += offsets
    return merged


class StreamWriter:
    """Copies pages into the store on a stream of its own.

    Made in the scheduler's thread, like `PageLoader`, and for the same reason.
    """

    def __init__(self, copies: RankCopies, *, on_gpu: bool) -> None:
        self._copies = copies
        self._stream = torch.cuda.Stream() if on_gpu else None

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Returns when the copy has ended."""
        if self._stream is None:
            self._copies.write(pool, slots, offsets)
            return
        with torch.cuda.stream(self._stream):
            self._copies.write(pool, slots, offsets)
        self._stream.synchronize()


def pin(store: torch.Tensor) -> list[str]:
    """Pin the store's memory, so that copies from and to the GPU run beside the computation.

    Returns a warning if the driver refuses it.
    """
    result = int(torch.cuda.cudart().cudaHostRegister(store.data_ptr(), store.numel(), 0))
    if not result:
        return []
    _forget_error()
    return [
        f"its memory was not pinned for the GPU (cudaHostRegister: error {result}), so that copies between store and "
        "device are slower and hold up the engine; raise the limit of locked memory (ulimit -l, or LimitMEMLOCK of the "
        "container runtime), or make the store smaller (--kv-store-gib)"
    ]


def _forget_error() -> None:
    """Let a call of torch report the error that the driver still has. Otherwise the engine's next kernel fails with it.

    torch does not expose `cudaGetLastError`. It calls it after each kernel that it starts.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
