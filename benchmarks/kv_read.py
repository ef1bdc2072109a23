"""KV read rate of the exchange's fetch, against raw NIXL on the same bytes in the same run.

    python benchmarks/kv_read.py [--json] [--pages 375] [--layers 32] [--kv-heads 8] [--head-dim 128] [--repeats 9]

Two pools in processes of their own, as two engines have them; this process plays both workers. A fetch is everything
that a worker waits for: page keys, look-up here, lease there, NIXL READ into staging memory, end of the lease,
hand-over to the engine's process. Raw NIXL is the READ alone: prepared descriptors, posted and polled without a pause.
Both take turns. Pages lie in one piece (`contiguous`) or in runs of 8 pages in random order (`scattered`). `ratio` is
the median, over the repeats, of fetch rate over the raw rate right after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from ctypes import addressof, c_char
from typing import Any
from uuid import uuid4

import numpy as np

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

from workers.kv.layout import Descriptor, PoolLayout, decode_descriptor, runs
from workers.kv.nixl_exchange import NixlExchange
from workers.kv.pinkeeper import Offload, PinKeeper
from workers.kv.staging_area import PageReader

from ampd.page_keys import page_keys
from ampd.wire import KvReply, KvRequest
from workers.kv.nixl_transport import NixlReader

PAGE = 16
BYTES_A_VALUE = 2
RUN_PAGES = 8
ORDERS = ("contiguous", "scattered")


def layout_of(arguments: argparse.Namespace, address: int) -> PoolLayout:
    """A pool with room for the pages of both orders."""
    width = PAGE * arguments.kv_heads * arguments.head_dim * BYTES_A_VALUE
    buffers = 2 * arguments.layers
    pages = 2 * arguments.pages + RUN_PAGES
    addresses = tuple(address + at * pages * width for at in range(buffers))
    return PoolLayout("benchmark", PAGE, pages, (width,) * buffers, addresses)


def positions(order: str, pages: int) -> list[int]:
    """Where the pages of a context lie in the pool."""
    if order == "contiguous":
        return list(range(pages))
    blocks = [list(range(at, min(at + RUN_PAGES, 2 * pages))) for at in range(pages, 2 * pages, RUN_PAGES)]
    random.Random(0).shuffle(blocks)
    return [page for block in blocks for page in block]


def context(order: str, pages: int) -> list[int]:
    """Tokens of a context; the last one is never read."""
    first = ORDERS.index(order)
    return [first, *(token % 1000 for token in range(1, pages * PAGE + 1))]


def run_pool(arguments: argparse.Namespace, address: str, orders: Sequence[str], stop: Any) -> None:
    """An engine's process, without the engine: a pool of random bytes and its keeper."""
    size = layout_of(arguments, 0).bytes_per_page * layout_of(arguments, 0).pages
    memory = mmap.mmap(-1, size)
    values = np.frombuffer(memory, dtype=np.uint64)
    values[:] = np.arange(len(values), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    base = addressof(c_char.from_buffer(memory))
    layout = layout_of(arguments, base)
    keeper = PinKeeper(layout, [(base, size)], address, layout.pages * PAGE, arguments.pages + RUN_PAGES, lambda: None)
    for number, order in enumerate(orders):
        keys = page_keys(context(order, arguments.pages), PAGE)
        where = positions(order, arguments.pages)
        keeper.offload(Offload(number, order, keys, lambda where=where: where))  # type: ignore[misc]
    stop.wait()
    os._exit(0)


class Peer:
    """`KvPeers` with one peer."""

    def __init__(self, exchange: NixlExchange) -> None:
        self._exchange = exchange

    async def call(self, _worker_id: str, request: KvRequest, _timeout_s: float) -> KvReply:
        return await self._exchange.serve(request)


class RawReader(NixlReader):
    """NIXL alone, on the reader's own agent and memory."""

    def raw(self, descriptor: Descriptor, sources: list[int], targets: list[int]) -> float:
        """Seconds of one READ."""
        done: Future[float] = Future()
        self._jobs.put(lambda: done.set_result(self._raw(descriptor, sources, targets)))
        return done.result()

    def _raw(self, descriptor: Descriptor, sources: list[int], targets: list[int]) -> float:
        agent = self._agent
        first, into, lengths = runs(sources, targets)
        theirs = agent.get_xfer_descs(descriptor.layout.blocks(first, lengths), "DRAM")
        ours = agent.get_xfer_descs(self._staging.blocks(into, lengths), "DRAM")
        handle = agent.initialize_xfer("READ", ours, theirs, self._remote("peer", descriptor))
        started_s = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - started_s
        assert state == "DONE", state
        handle.release()
        return seconds


async def measure(arguments: argparse.Namespace, exchanges: list[NixlExchange], readers: list[RawReader]) -> list[Any]:
    """One result for each order of the pages."""
    source, reader = exchanges
    reader.connect(Peer(source), lambda _session, _tokens: None)
    results = []
    for order in ORDERS:
        tokens = context(order, arguments.pages)
        keys = page_keys(tokens, PAGE)
        lease = await source.serve(KvRequest(op="lease", keys=keys, ttl_s=600.0))
        assert lease["matched"] == arguments.pages
        descriptor = decode_descriptor(lease["descriptor"])
        targets = list(range(arguments.pages))
        size = arguments.pages * source.layout.bytes_per_page
        fetch_s, raw_s = [], []
        for repeat in range(arguments.repeats + 1):
            rid = uuid4().hex
            fetched = await reader.fetch(rid, order, tokens, "peer", 60.0)
            assert fetched.error is None, fetched.error
            assert fetched.bytes == size
            await reader.discard(rid)
            raw = await asyncio.to_thread(readers[-1].raw, descriptor, lease["pages"], targets)
            if repeat:
                fetch_s.append(fetched.seconds)
                raw_s.append(raw)
        rate, limit = size / statistics.median(fetch_s) / 1e9, size / statistics.median(raw_s) / 1e9
        results.append(
            {
                "order": order,
                "pages": arguments.pages,
                "bytes": size,
                "fetch_s": round(statistics.median(fetch_s), 5),
                "raw_s": round(statistics.median(raw_s), 5),
                "fetch_gb_per_s": round(rate, 3),
                "raw_nixl_gb_per_s": round(limit, 3),
                "ratio": round(statistics.median(raw / fetch for raw, fetch in zip(raw_s, fetch_s, strict=True)), 3),
            }
        )
    return results


async def run(arguments: argparse.Namespace) -> list[Any]:
    """Start both pools, measure, end them."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    readers: list[RawReader] = []

    def make_reader(staging: PoolLayout) -> PageReader:
        readers.append(RawReader(staging))
        return readers[-1]

    make: Callable[[], NixlExchange] = lambda: NixlExchange(make_reader)  # noqa: E731
    exchanges = [make(), make()]
    processes = [
        context.Process(target=run_pool, args=(arguments, exchange.address, orders, stop), daemon=True)
        for exchange, orders in zip(exchanges, (ORDERS, ()), strict=True)
    ]
    try:
        for process, exchange in zip(processes, exchanges, strict=True):
            process.start()
            await exchange.open(60.0)
        return await measure(arguments, exchanges, readers)
    finally:
        stop.set()
        for exchange in exchanges:
            await exchange.close()
        for process in processes:
            process.join(10.0)
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--pages", type=int, default=375, help="pages of 16 tokens in one read")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments))
    if arguments.json:
        print(json.dumps({"results": results}))
        return
    print(f"{'pages':>12} {'bytes':>12} {'fetch GB/s':>11} {'raw GB/s':>9} {'ratio':>6}", file=sys.stdout)
    for result in results:
        rates = f"{result['fetch_gb_per_s']:11.2f} {result['raw_nixl_gb_per_s']:9.2f} {result['ratio']:6.2f}"
        print(f"{result['order']:>12} {result['bytes']:12} {rates}")


if __name__ == "__main__":
    main()
