"""Copies staged pages into SGLang's pool, layer by layer, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter
from sglang.srt.utils import get_device_module

from workers.kv.layout import PoolLayout, runs
from workers.kv.pinkeeper import PinKeeper

log = logging.getLogger(__name__)

_Load = tuple[list[int], list[int]]
"""Staging pages, and the pool's pages that they are copied into."""


class PageLoader:
    """The loads of one engine: queued by request, started together for one forward pass.

    Args:
        views: the pool as one tensor of pages per buffer.
        counter: what SGLang waits on, layer by layer.
    """

    def __init__(self, keeper: PinKeeper, views: list[Any], counter: LayerWiseLoadCounter) -> None:
        self._keeper = keeper
        self._counter = counter
        self._device = get_device_module() if keeper.layout.memory == "VRAM" else None
        self._views = views
        self._staging_views = _staging_views(keeper, keeper.layout, pin=self._device is not None)
        self._queued: dict[str, _Load] = {}
        self._started: dict[int, list[str]] = {}
        self._jobs: SimpleQueue[tuple[int, list[_Load], Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ampd-kv-load", daemon=True)
        self._thread.start()

    def queue(self, rid: str, keys: list[str], pages: list[int]) -> bool:
        """Queue a request's load into the pool's `pages`; False if its staged pages have gone."""
        sources = self._keeper.begin_load(rid, keys)
        if sources is None:
            return False
        self._queued[rid] = (sources, pages)
        return True

    def cancel(self, rid: str) -> bool:
        """Take a queued load back; False if there is none."""
        if self._queued.pop(rid, None) is None:
            return False
        self._keeper.end_load(rid)
        return True

    def start(self) -> int:
        """Start all queued loads. Returns the counter's index, or -1 if nothing is queued."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        index: int = self._counter.update_producer()
        self._started[index] = list(queued)
        ready = None
        if self._device is not None:
            ready = self._device.Event()
            ready.record()
        self._jobs.put((index, list(queued.values()), ready))
        return index

    def finish(self, index: int) -> bool:
        """End the loads that were started under `index`; returns whether all of them have landed."""
        landed: bool = self._counter.finish(index)
        for rid in self._started.pop(index, ()):
            self._keeper.end_load(rid)
        return landed

    def reset(self) -> None:
        """Forget queued loads and end started ones."""
        self._queued.clear()
        for index in list(self._started):
            self.finish(index)

    def close(self) -> None:
        """End the thread and let the staging memory go."""
        self._jobs.put(None)
        self._thread.join(10.0)
        self._staging_views.clear()

    def _run(self) -> None:
        stream = None if self._device is None else self._device.Stream()
        while (job := self._jobs.get()) is not None:
            index, loads, ready = job
            try:
                if ready is not None:
                    ready.synchronize()
                self._copy(index, loads, stream)
            except BaseException as error:
                log.exception("KV load failed")
                self._counter.fail(index, error)

    def _copy(self, index: int, loads: list[_Load], stream: Any) -> None:
        copies = [run for sources, targets in loads for run in zip(*runs(sources, targets), strict=True)]
        for layer in range(self._counter.num_layers):
            with nullcontext() if self._device is None else self._device.stream(stream):
                for buffer in (2 * layer, 2 * layer + 1):
                    into, out_of = self._views[buffer], self._staging_views[buffer]
                    for source, target, length in copies:
                        into[target : target + length].copy_(out_of[source : source + length], non_blocking=True)
            if stream is not None:
                stream.synchronize()
            self._counter.complete(index, layer)


def _staging_views(keeper: PinKeeper, layout: PoolLayout, *, pin: bool) -> list[Any]:
    """Staging memory as one tensor of pages per buffer; pinned for the GPU if there is one."""
    flat = torch.frombuffer(keeper.staging.map, dtype=torch.uint8)
    if pin:
        torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0)
    views, at = [], 0
    for width in layout.page_bytes:
        size = width * keeper.staging_pages
        views.append(flat[at : at + size].view(keeper.staging_pages, width))
        at += size
    return views
