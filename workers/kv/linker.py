"""SGLang's side of the KV exchange: a cache linker inside the scheduler process.

SGLang offers the pages of its radix cache. They stay pinned in its own pool, where peers read them. Pages that the
worker has fetched from peers wait in staging memory: a look-up is a dictionary hit, a load is a local copy, and nothing
here waits for the network.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from workers.kv.offload_order import OffloadOrder
from workers.kv.page_loader import PageLoader
from workers.kv.pinkeeper import Offload, PinKeeper
from workers.kv.sglang_fingerprint import engine_fingerprint
from workers.kv.sglang_pool import page_views, pool_layout, pool_regions

WAKE_FD = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
"""Readable when a sleeping scheduler has released pins to collect."""


class KvLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Pins offloaded pages for peers and loads staged ones.

    Args:
        extra_config: `control` (address of the worker's channel), `budget_fraction` (of the pool, for pins),
            `staging_tokens`.
    """

    def __init__(
        self,
        server_args: Any,
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
        layout = pool_layout(pool, self.page_size, engine_fingerprint(server_args))
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(len(layout.page_bytes) // 2)
        self.keeper = PinKeeper(
            layout,
            pool_regions(pool),
            extra_config["control"],
            int(extra_config["budget_fraction"] * int(allocator.size)),
            -(-int(extra_config["staging_tokens"]) // self.page_size),
            wake=lambda: os.eventfd_write(WAKE_FD, 1),
        )
        self._loader = PageLoader(self.keeper, page_views(pool, self.page_size), self.layer_done_counter)
        self._offloads = OffloadOrder()
        self._wrapper: Any = None

    def bind(self, wrapper: Any) -> None:
        """Give the tree-side wrapper, whose pending offloads are put into the order of their release."""
        self._wrapper = wrapper

    # -- loads

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return list(range(1, self.keeper.staged(rid, transfers[0].keys) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        return self._loader.queue(rid, list(transfers[0].keys), self._pages(transfers[0].device_indices))

    def cancel_queued_load(self, rid: str) -> bool:
        return self._loader.cancel(rid)

    def start_layer_wise_loading(self) -> int:
        return self._loader.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._loader.finish(counter_index)

    # -- offloads

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        if session_id is None:
            return False
        transfer = transfers[0]
        ready = self.record_offload_ready() if self.keeper.layout.memory == "VRAM" else []
        indices = transfer.device_indices

        def pages() -> list[int]:
            for event in ready:
                event.synchronize()
            return self._pages(indices)

        number = self._offloads.add()
        self.keeper.offload(Offload(number, session_id, [bytes.fromhex(key) for key in transfer.keys], pages))
        return True

    def num_completed_offloads(self) -> int:
        """How many offloads may be taken back, after putting them first on both lists."""
        with suppress(BlockingIOError):
            os.eventfd_read(WAKE_FD)
        if self._wrapper is None:
            raise RuntimeError("AMPD's SGLang plugin is not active in this process (does SGLANG_PLUGINS leave it out?)")
        released = set()
        while self.keeper.released:
            released.add(self.keeper.released.popleft())
        if released:
            self._offloads.release(released, self._wrapper.pending_offloads)
        return self._offloads.completed

    def pop_completed_offload(self) -> bool:
        """Hand the oldest completed offload back as not stored: its node is unlocked and may be offered again."""
        self._offloads.pop()
        return False

    # -- lifecycle

    def reset(self) -> None:
        self._loader.reset()
        self.keeper.reset()
        self._offloads.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        self._loader.close()
        self.keeper.close()

    def _pages(self, slots: Any) -> list[int]:
        firsts: list[int] = slots[:: self.page_size].tolist()
        return [slot // self.page_size for slot in firsts]
