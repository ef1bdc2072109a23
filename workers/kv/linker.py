"""SGLang's side of the KV exchange: a cache linker inside the scheduler process.

SGLang offers the pages of its radix cache; they stay pinned in its own pool, where peers read them. Pages that the
worker has fetched from peers wait in staging memory: a look-up is a dictionary hit, a load a local copy, and nothing
here waits for the network.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import nullcontext, suppress
from queue import SimpleQueue
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.utils import get_device_module

from workers.kv.layout import PoolLayout, runs
from workers.kv.pinkeeper import Offload, PinKeeper
from workers.kv.sglang_pool import page_views, pool_layout, pool_regions

logger = logging.getLogger(__name__)

WAKE_FD = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
"""Readable when a sleeping scheduler has released pins to collect."""

_Load = tuple[str, list[int], list[int]]


class KvLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Pins offloaded pages for peers and loads staged ones.

    Args:
        extra_config: `control` (address of the worker's channel), `budget_fraction` (of the pool, for pins),
            `staging_tokens`, `fingerprint` (of the model).
    """

    def __init__(
        self,
        _server_args: Any,
        params: Any,
        *,
        components: Any,  # noqa: ARG002
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        self.page_size = int(params.page_size)
        allocator = params.token_to_kv_pool_allocator
        pool = allocator.get_kvcache()
        layout = pool_layout(pool, self.page_size, extra_config["fingerprint"])
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(len(layout.page_bytes) // 2)
        self._device = get_device_module()
        self._on_device = layout.memory == "VRAM"
        self.keeper = PinKeeper(
            layout,
            pool_regions(pool),
            extra_config["control"],
            int(extra_config["budget_fraction"] * int(allocator.size)),
            -(-int(extra_config["staging_tokens"]) // self.page_size),
            wake=lambda: os.eventfd_write(WAKE_FD, 1),
        )
        self._views = page_views(pool, self.page_size)
        self._staging_views = _staging_views(self.keeper, layout, pin=self._on_device)
        self._wrapper: Any = None
        self._next = 0
        self._order: list[int] = []
        self._results = 0
        self._queued: dict[str, _Load] = {}
        self._started: dict[int, list[str]] = {}
        self._loads: SimpleQueue[tuple[int, list[_Load], Any] | None] = SimpleQueue()
        self._loader = threading.Thread(target=self._load_loop, name="ampd-kv-load", daemon=True)
        self._loader.start()

    def bind(self, wrapper: Any) -> None:
        """Give the tree-side wrapper, whose pending offloads are put into the order of their release."""
        self._wrapper = wrapper

    # -- loads

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return list(range(1, self.keeper.staged(rid, transfers[0].keys) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        keys = list(transfers[0].keys)
        sources = self.keeper.begin_load(rid, keys)
        if sources is None:
            return False
        self._queued[rid] = (rid, sources, self._pages(transfers[0].device_indices))
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        if self._queued.pop(rid, None) is None:
            return False
        self.keeper.end_load(rid)
        return True

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index: int = self.layer_done_counter.update_producer()
        self._started[index] = [rid for rid, _, _ in loads]
        ready = None
        if self._on_device:
            ready = self._device.Event()
            ready.record()
        self._loads.put((index, loads, ready))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        landed: bool = self.layer_done_counter.finish(counter_index)
        for rid in self._started.pop(counter_index, ()):
            self.keeper.end_load(rid)
        return landed

    def _load_loop(self) -> None:
        stream = self._device.Stream() if self._on_device else None
        while (task := self._loads.get()) is not None:
            index, loads, ready = task
            try:
                if ready is not None:
                    ready.synchronize()
                self._copy(index, loads, stream)
            except BaseException as error:
                logger.exception("KV load failed")
                self.layer_done_counter.fail(index, error)

    def _copy(self, index: int, loads: list[_Load], stream: Any) -> None:
        copies = [run for _, sources, targets in loads for run in zip(*runs(sources, targets), strict=True)]
        for layer in range(self.layer_done_counter.num_layers):
            with self._device.stream(stream) if stream is not None else nullcontext():
                for buffer in (2 * layer, 2 * layer + 1):
                    into, out_of = self._views[buffer], self._staging_views[buffer]
                    for source, target, length in copies:
                        into[target : target + length].copy_(out_of[source : source + length], non_blocking=True)
            if stream is not None:
                stream.synchronize()
            self.layer_done_counter.complete(index, layer)

    # -- offloads

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        if session_id is None:
            return False
        transfer = transfers[0]
        ready = self.record_offload_ready() if self._on_device else []
        indices = transfer.device_indices

        def pages() -> list[int]:
            for event in ready:
                event.synchronize()
            return self._pages(indices)

        number, self._next = self._next, self._next + 1
        self._order.append(number)
        self.keeper.offload(Offload(number, session_id, [bytes.fromhex(key) for key in transfer.keys], pages))
        return True

    def num_completed_offloads(self) -> int:
        """How many offloads may be taken back, after putting them first on both lists.

        SGLang takes completed offloads strictly in the order in which they were made; pins are released in any order.
        """
        with suppress(BlockingIOError):
            os.eventfd_read(WAKE_FD)
        if self._wrapper is None:
            raise RuntimeError("AMPD's SGLang plugin is not active in this process (does SGLANG_PLUGINS leave it out?)")
        released = set()
        while self.keeper.released:
            released.add(self.keeper.released.popleft())
        if released:
            pending = self._wrapper.pending_offloads
            rest = range(self._results, len(self._order))
            order = [*range(self._results), *sorted(rest, key=lambda at: self._order[at] not in released)]
            self._results += sum(self._order[at] in released for at in rest)
            pending[:] = [pending[at] for at in order]
            self._order = [self._order[at] for at in order]
        return self._results

    def pop_completed_offload(self) -> bool:
        """Hand the oldest completed offload back as not stored: its node is unlocked and may be offered again."""
        self._results -= 1
        self._order.pop(0)
        return False

    # -- lifecycle

    def reset(self) -> None:
        self._queued.clear()
        for index in list(self._started):
            self.finish_layer_wise_loading(index)
        self.keeper.reset()
        self._order.clear()
        self._results = 0
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        self._loads.put(None)
        self._loader.join(10.0)
        self._staging_views.clear()
        self.keeper.close()

    def _pages(self, slots: Any) -> list[int]:
        firsts: list[int] = slots[:: self.page_size].tolist()
        return [slot // self.page_size for slot in firsts]


def _staging_views(keeper: PinKeeper, layout: PoolLayout, *, pin: bool) -> list[Any]:
    """Staging memory as one tensor of pages a buffer; pinned for the GPU if there is one."""
    flat = torch.frombuffer(keeper.staging.map, dtype=torch.uint8)
    if pin:
        torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0)
    views, at = [], 0
    for width in layout.page_bytes:
        size = width * keeper.staging_pages
        views.append(flat[at : at + size].view(keeper.staging_pages, width))
        at += size
    return views
