"""KV reads of the exchange: over NIXL, against raw NIXL with 1 MB blocks, and in place, on as many bytes in one run.

    python -m benchmarks.kv_read [--json] [--pages 200] [--layers 32] [--kv-heads 8] [--head-dim 128] [--repeats 9]
        [--kv-checksums reads]

Two workers in processes of their own, each with a store and its exchange, and with ranks that write nothing: the
source's store is full of random bytes. A fetch is everything that a round waits for: page keys, look-up here, lease
there, memory here, NIXL READ, end of the lease, checksums, and the records held for the request. Raw NIXL is the READ
alone: prepared descriptors, posted and polled without a pause. In place, the fetch ends when the records may be loaded
from the source's store; their copy, which is waited for, is not counted. All three take turns. The records of a
context lie in one piece in the source's store (`contiguous`), or in runs of 8 pages between those of another session
(`scattered`). `ratio` is the median, over the repeats, of fetch rate over the raw rate right after it; `lowest` is the
smallest. `in place` is the median of the time over NIXL as a multiple of the time in place right after it. Records hold
all heads, so equal and unequal TP move the same blocks; the degrees are there to show it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from operator import truediv
from socket import socket, socketpair
from typing import Any
from uuid import uuid4

import numpy as np

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

from ampd.keys import page_keys
from ampd.wire import KvReply, KvRequest
from tests.workers.kv.store.store_lab import forget_all
from workers.kv.engine_store import EngineStore
from workers.kv.exchange import KvExchange
from workers.kv.nixl_transport import NixlTransport, blocks_at
from workers.kv.peer_reads import Remote, decode_descriptor
from workers.kv.ranks.link import Offered, RankLink
from workers.kv.shared import KvGeometry, Place, PoolGeometry, Section, StoreMemory, this_host

PAGE = 16
BYTES_PER_VALUE = 2
RUN_PAGES = 8
ORDERS = ("contiguous", "scattered")
DEGREES = ((1, 1), (2, 4))
"""TP of the source and of the reader."""
TIMEOUT_S = 60.0
BLOCK_BYTES = 1 << 20


def geometry_of(arguments: argparse.Namespace) -> KvGeometry:
    """Plain attention: one record per page."""
    head_bytes = 2 * PAGE * arguments.head_dim * BYTES_PER_VALUE
    section = Section("kv", arguments.kv_heads, arguments.layers, head_bytes)
    return KvGeometry("benchmark", PAGE, (PoolGeometry("kv", (section,)),))


def context(order: str, pages: int) -> list[int]:
    """Tokens of a context; the last one is never read."""
    first = (*ORDERS, "other").index(order)
    return [first, *(token % 1000 for token in range(1, pages * PAGE + 1))]


class RawTransport(NixlTransport):
    """The real transport, which can also read alone: without page keys, leases and records."""

    def raw(self, remote: Remote, size_bytes: int) -> float:
        """Seconds of one READ of the first bytes of both stores, in large blocks, polled without a pause.

        Raises:
            ConnectionError: the read failed.
        """
        done: Future[float] = Future()

        def read() -> None:
            try:
                done.set_result(self._raw(remote, size_bytes))
            except Exception as error:
                done.set_exception(error)

        self._jobs.put(read)
        return done.result()

    def _raw(self, remote: Remote, size_bytes: int) -> float:
        blocks = [(at, min(BLOCK_BYTES, size_bytes - at)) for at in range(0, size_bytes, BLOCK_BYTES)]
        theirs = self._agent.get_xfer_descs(blocks_at(remote.address, blocks), "DRAM")
        ours = self._agent.get_xfer_descs(blocks_at(self._address, blocks), "DRAM")
        handle = self._agent.initialize_xfer("READ", ours, theirs, self._remote_agent(remote))
        started_s = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - started_s
        handle.release()
        if state != "DONE":
            raise ConnectionError(f"NIXL ended a read with {state}")
        return seconds


class NoDevice:
    """A rank's copies and mappings, without a device."""

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Leave in the store what lies there."""

    def map(self, _number: int, _place: Place) -> str:
        """Nothing is loaded."""
        return ""

    def unmap(self, _number: int) -> None:
        """Nothing was mapped."""


class Worker:
    """A store, its exchange, and ranks without an engine."""

    def __init__(self, geometry: KvGeometry, pages: int, tp: int, has_checksums: bool) -> None:
        self.transports: list[RawTransport] = []
        record_bytes = geometry.pools[0].record_bytes
        # The allocator hands out whole chunks.
        memory = StoreMemory.create((pages + 2 * RUN_PAGES) * record_bytes)
        store = EngineStore(memory, tp, has_checksums=has_checksums, host=this_host())
        self.exchange = KvExchange(store, self._transport)
        addresses = self.exchange.store.addresses
        self.ranks = [
            RankLink(address, rank, geometry, NoDevice(), NoDevice()) for rank, address in enumerate(addresses)
        ]

    def _transport(self, address: int, size_bytes: int) -> RawTransport:
        self.transports.append(RawTransport(address, size_bytes))
        return self.transports[-1]

    def offer(self, session: str, keys: Sequence[bytes]) -> None:
        """As an engine that has computed these pages."""
        names = {"kv": b"".join(keys)}
        slots = {"kv": list(range(len(keys)))}
        for rank in self.ranks:
            rank.offer(Offered(session, names, lambda: slots))

    async def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        await self.exchange.close()


class Wire:
    """Whole objects over a socket, both ways."""

    @classmethod
    async def over(cls, end: socket) -> Wire:
        return cls(*await asyncio.open_connection(sock=end, limit=1 << 24))

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, content: object) -> None:
        data = pickle.dumps(content)
        self._writer.write(len(data).to_bytes(8) + data)

    async def receive(self) -> Any:
        size = int.from_bytes(await self._reader.readexactly(8))
        return pickle.loads(await self._reader.readexactly(size))


async def serve(arguments: argparse.Namespace, tp: int, end: socket) -> None:
    """The source: fill the store, then answer the reader until it sends None."""
    requests = await Wire.over(end)
    worker = Worker(geometry_of(arguments), 3 * arguments.pages, tp, arguments.kv_checksums == "reads")
    await worker.exchange.open(TIMEOUT_S)
    values = np.frombuffer(worker.exchange.store.memory.map, dtype=np.uint64)
    values[:] = np.arange(len(values), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    del values
    keys = {name: page_keys(context(name, arguments.pages), PAGE, tenant="") for name in (*ORDERS, "other")}
    for session, held in keys.items():
        await worker.exchange.store.begin_request(session, session, held)
    worker.offer("contiguous", keys["contiguous"])
    for at in range(0, arguments.pages, RUN_PAGES):
        for session in ("scattered", "other"):
            worker.offer(session, keys[session][at : at + RUN_PAGES])
    await worker.exchange.store.settle(TIMEOUT_S)
    requests.send("ready")
    while (request := await requests.receive()) is not None:
        requests.send(await worker.exchange.serve(request))
    await worker.close()


def run_source(arguments: argparse.Namespace, tp: int, end: socket) -> None:
    """The source's process."""
    asyncio.run(serve(arguments, tp, end))
    os._exit(0)


class Peer:
    """`KvPeers` with one peer, in another process."""

    def __init__(self, requests: Wire) -> None:
        self._requests = requests
        self._lock = asyncio.Lock()

    async def call(self, _worker_id: str, request: KvRequest, _timeout_s: float) -> KvReply:
        async with self._lock:
            self._requests.send(request)
            reply: KvReply = await self._requests.receive()
            return reply


async def measure(arguments: argparse.Namespace, worker: Worker, peer: Peer, degrees: str) -> list[dict[str, Any]]:
    """One result per order of the records."""
    exchange = worker.exchange
    await exchange.open(TIMEOUT_S)
    exchange.connect(peer, lambda _session, _tokens: None)
    size = arguments.pages * geometry_of(arguments).pools[0].record_bytes
    results = []
    for order in ORDERS:
        keys = page_keys(context(order, arguments.pages), PAGE, tenant="")
        request = KvRequest(op="lease", keys=keys, ttl_s=600.0)
        lease = await peer.call("source", request, TIMEOUT_S)
        assert lease["matched"] == arguments.pages
        descriptor = decode_descriptor(lease["descriptor"])
        remote = Remote("source", descriptor.agent, descriptor.address)
        fetch_s, in_place_s, raw_s = list[float](), list[float](), list[float]()
        for _ in range(arguments.repeats + 1):
            for host, seconds in (("", fetch_s), (this_host(), in_place_s)):
                exchange.store.host = host
                rid = uuid4().hex
                fetched = await exchange.fetch(rid, keys, exchange.protect(rid, keys), "source", TIMEOUT_S)
                assert (fetched.error, fetched.bytes, fetched.tokens) == (None, size, arguments.pages * PAGE), fetched
                await exchange.unprotect(rid)
                await exchange.release_session(rid)
                await exchange.store.are_written(list(exchange.store._lent))
                forget_all(exchange.store.directory)
                seconds.append(fetched.seconds)
            raw_s.append(await asyncio.to_thread(worker.transports[0].raw, remote, size))
        for seconds in (fetch_s, in_place_s, raw_s):
            del seconds[0]  # the first one touches the memory, connects, and maps
        ratios = [raw / fetch for raw, fetch in zip(raw_s, fetch_s, strict=True)]
        result = {
            "tp": degrees,
            "order": order,
            "pages": arguments.pages,
            "bytes": size,
            "fetch_gb_per_s": round(size / statistics.median(fetch_s) / 1e9, 3),
            "raw_nixl_gb_per_s": round(size / statistics.median(raw_s) / 1e9, 3),
            "ratio": round(statistics.median(ratios), 3),
            "lowest": round(min(ratios), 3),
            "in_place_s": round(statistics.median(in_place_s), 4),
            "in_place": round(statistics.median(map(truediv, fetch_s, in_place_s)), 1),
        }
        results.append(result)
    return results


async def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start both workers per pair of degrees, measure, end them."""
    spawn = multiprocessing.get_context("spawn")
    results = []
    for source_tp, reader_tp in DEGREES:
        ours, theirs = socketpair()
        process = spawn.Process(target=run_source, args=(arguments, source_tp, theirs), daemon=True)
        process.start()
        theirs.close()
        requests = await Wire.over(ours)
        worker = Worker(geometry_of(arguments), arguments.pages, reader_tp, arguments.kv_checksums == "reads")
        try:
            assert await requests.receive() == "ready"
            results += await measure(arguments, worker, Peer(requests), f"{source_tp} -> {reader_tp}")
            requests.send(None)
        finally:
            await worker.close()
            process.join(10.0)
            process.kill()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--pages", type=int, default=200, help="pages of 16 tokens in one read")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--kv-checksums", choices=("off", "reads"), default="reads", help="as of the workers: what was read is verified"
    )
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments))
    if arguments.json:
        print(json.dumps({"results": results}))
        return
    print(
        f"{'TP':>8} {'records':>12} {'bytes':>12} {'fetch GB/s':>11} {'raw GB/s':>9} {'ratio':>6} {'lowest':>6}"
        f" {'in place':>8}",
        file=sys.stdout,
    )
    for result in results:
        rates = f"{result['fetch_gb_per_s']:11.2f} {result['raw_nixl_gb_per_s']:9.2f}"
        ratios = f"{result['ratio']:6.2f} {result['lowest']:6.2f} {result['in_place']:7.1f}x"
        print(f"{result['tp']:>8} {result['order']:>12} {result['bytes']:12} {rates} {ratios}")


if __name__ == "__main__":
    main()
