"""Workers without an engine: a store exchange, and ranks that write what a key says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256

from ampd.keys import page_keys
from ampd.wire import KvReply, KvRequest
from workers.kv.engine_store import EngineStore
from workers.kv.exchange import KvExchange, KvFetch
from workers.kv.nixl_transport import NixlTransport
from workers.kv.ranks.link import Offered, RankLink
from workers.kv.shared import NEIGHBOUR_BYTES, KvGeometry, Place, PoolGeometry, Section, StoreMemory

PAGE = 16
RECORD = 64
PAGES = 64


def text(seed: int, pages: int) -> list[int]:
    """Tokens of a context, one more than fill the pages."""
    return [seed * 1000 + number for number in range(pages * PAGE + 1)]


def geometry(fingerprint: str = "f", record_bytes: int = RECORD) -> KvGeometry:
    """One pool, two heads."""
    return KvGeometry(fingerprint, PAGE, (PoolGeometry("kv", (Section("kv", 2, 1, record_bytes // 2),)),))


def record_of(key: bytes, record_bytes: int = RECORD) -> bytes:
    """The bytes that belong to a key."""
    return (sha256(key).digest() * (record_bytes // 32))[:record_bytes]


class Rank:
    """A rank that writes its half of each record."""

    def __init__(self, exchange: KvExchange[EngineStore], number: int, form: KvGeometry) -> None:
        self._memory = StoreMemory.open(*exchange.store.memory.place)
        self.neighbours: dict[int, StoreMemory] = {}
        self._half = form.page_bytes // 2
        self._start = number * self._half
        self._keys: list[bytes] = []
        self.link = RankLink(exchange.store.addresses[number], number, form, self, self)

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        assert pool == "kv"
        for slot, offset in zip(slots, offsets, strict=True):
            self._memory.map[self._own(offset)] = self.part_of(self._keys[slot])

    def read(self, offset: int) -> bytes:
        """This rank's half of a record in the store, or in that of a neighbour."""
        number, place = divmod(offset, NEIGHBOUR_BYTES)
        memory = self.neighbours[number] if number else self._memory
        return memory.map[self._own(place)]

    def map(self, number: int, place: Place) -> str:
        try:
            if not self._memory.map.closed:
                self.neighbours[number] = StoreMemory.of_neighbour(*place)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def unmap(self, number: int) -> None:
        if number in self.neighbours:
            self.neighbours.pop(number).close()

    def part_of(self, key: bytes) -> bytes:
        """This rank's half of the record of a key."""
        return record_of(key, 2 * self._half)[self._own(0)]

    def _own(self, offset: int) -> slice:
        return slice(offset + self._start, offset + self._start + self._half)

    def offer(self, session_id: str, keys: Sequence[bytes]) -> None:
        first = len(self._keys)
        self._keys += keys
        slots = {"kv": list(range(first, len(self._keys)))}
        self.link.offer(Offered(session_id, {"kv": b"".join(keys)}, lambda: slots))

    def close(self) -> None:
        self.link.close()
        for number in list(self.neighbours):
            self.unmap(number)
        self._memory.close()


class Worker:
    """A store exchange with the ranks of its engine."""

    def __init__(
        self,
        ranks: int = 2,
        fingerprint: str = "f",
        pages: int = PAGES,
        *,
        record_bytes: int = RECORD,
        has_checksums: bool = True,
        host: str = "",
    ) -> None:
        memory = StoreMemory.create(pages * record_bytes)
        store = EngineStore(memory, ranks, has_checksums=has_checksums, host=host)
        self.exchange = KvExchange(store, NixlTransport)
        self.geometry = geometry(fingerprint, record_bytes)
        self.held: dict[str, int] = {}
        self.ranks: list[Rank] = []

    async def start(self, peers: Peers, name: str) -> None:
        self.start_ranks()
        await self.exchange.open(10.0)
        self.exchange.connect(peers, self.held.__setitem__)
        peers.workers[name] = self

    def start_ranks(self) -> None:
        count = len(self.exchange.store.addresses)
        self.ranks = [self.rank(number) for number in range(count)]

    def rank(self, number: int) -> Rank:
        """A rank of the engine."""
        return Rank(self.exchange, number, self.geometry)

    async def compute(self, session_id: str, tokens: Sequence[int]) -> list[bytes]:
        """As an engine that prefills `tokens` for a session."""
        keys = page_keys(tokens, PAGE, tenant="")
        await self.exchange.store.begin_request(f"r-{session_id}", session_id, keys)
        for rank in self.ranks:
            rank.offer(session_id, keys)
        await self.exchange.store.settle(10.0)
        self.exchange.store.end_request(f"r-{session_id}", session_id, keys)
        return keys

    async def read(self, rid: str, tokens: Sequence[int], source: str, timeout_s: float) -> KvFetch:
        """Read what is missing of a prompt, as a worker does before it submits a request."""
        keys = page_keys(tokens[:-1], PAGE, tenant="")
        return await self.exchange.fetch(rid, keys, self.exchange.protect(rid, keys), source, timeout_s)

    def offsets(self, keys: Sequence[bytes]) -> Sequence[int]:
        """Where the records of `keys` that are there lie."""
        found = self.exchange.store.protect("look", keys).records["kv"].offsets
        self.exchange.store.directory.unprotect("look")
        return found

    def stored(self, keys: Sequence[bytes]) -> list[bytes]:
        """The bytes of the records of `keys` that are there."""
        memory, size = self.exchange.store.memory.map, self.geometry.page_bytes
        return [memory[offset : offset + size] for offset in self.offsets(keys)]

    async def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        await self.exchange.close()


class Peers:
    """`KvPeers` within one process. `before` may fail a call or delay it."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.before = None

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        if self.before is not None:
            await self.before(request)
        return await asyncio.wait_for(self.workers[worker_id].exchange.serve(request), timeout_s)


@asynccontextmanager
async def workers(**named: Worker) -> AsyncIterator[Peers]:
    """Connected workers."""
    peers = Peers()
    try:
        for name, worker in named.items():
            await worker.start(peers, name)
        yield peers
    finally:
        for worker in named.values():
            await worker.close()
