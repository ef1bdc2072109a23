"""For the tests of the store: pools, chained keys, and a store with bytes that follow from the keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

from workers.kv.shared import PoolGeometry, Section
from workers.kv.store.directory import Places, Reservation, StoreDirectory
from workers.kv.store.runs import PageRun
from workers.kv.store.sessions import Surplus

PAGE = 16
RECORD = 64


def pool_of(name: str, record_bytes: int = RECORD, window_pages: int = 0) -> PoolGeometry:
    return PoolGeometry(name, (Section(name, 1, 1, record_bytes),), window_pages)


KV = pool_of("kv")
SWA = pool_of("swa", window_pages=2)
MAMBA = pool_of("mamba", record_bytes=4 * RECORD, window_pages=1)


def keys(text: str) -> list[bytes]:
    """One key a letter, each naming all the letters before it, as chained hashes do."""
    return [text[: i + 1].encode() for i in range(len(text))]


def tail(text: str, shared: int) -> list[bytes]:
    return keys(text)[shared:]


def store_of(pages: int, *pools: PoolGeometry, surplus: Surplus | None = None) -> StoreDirectory:
    return StoreDirectory(pages * RECORD, PAGE, pools or (KV,), surplus)


def put(directory: StoreDirectory, session: str, text: str, shared: int = 0, **trailing: str) -> Reservation:
    """`offer` pages of what becomes the session's context."""
    if session:
        directory.sessions.touch(session, keys(text))
    return offer(directory, session, text, shared, **trailing)


def offer(directory: StoreDirectory, session: str, text: str, shared: int = 0, **trailing: str) -> Reservation:
    """Store the pages of a context from page `shared` on; `trailing`: pool=letters whose pages have a record."""
    named = {"kv": tail(text, shared)}
    for pool, letters in trailing.items():
        named[pool] = [key for key in tail(text, shared) if key.decode()[-1] in letters]
    reservation = directory.reserve(session, named, 0.0)
    assert reservation is not None
    directory.written(reservation.id)
    return reservation


def session_ids(directory: StoreDirectory) -> list[str]:
    """The sessions that a store knows, least recently used first."""
    return list(directory.sessions._sessions)


def forget_all(directory: StoreDirectory) -> None:
    """Let nothing find any record."""
    for run in list(dict.fromkeys(directory._runs._index.values())):
        forget(directory, run)


def forget(directory: StoreDirectory, run: PageRun) -> None:
    """Let nothing find the records of a run."""
    directory.sessions.lose(run)
    directory._runs.forget(run)


def offsets(reservation: Reservation | None, pool: str = "kv") -> list[int]:
    assert reservation is not None
    return list(reservation.offsets[pool].offsets)


@cache
def content(pool: str, key: bytes, record_bytes: int) -> bytes:
    """The bytes that the record of a key must have."""
    return (blake2b(pool.encode() + key).digest() * (record_bytes // 64 + 1))[:record_bytes]


class ByteStore:
    """A directory with the memory that it speaks about."""

    def __init__(self, directory: StoreDirectory, size_bytes: int, pools: Sequence[PoolGeometry]) -> None:
        self.directory = directory
        self.memory = bytearray(size_bytes)
        self.pools = {pool.name: pool for pool in pools}

    def write(self, pool: str, key: bytes, offset: int) -> None:
        data = content(pool, key, self.pools[pool].record_bytes)
        self.memory[offset : offset + len(data)] = data

    def read(self, pool: str, offset: int) -> bytes:
        return bytes(self.memory[offset : offset + self.pools[pool].record_bytes])

    def check(self, pool: str, key: bytes, data: bytes) -> None:
        assert data == content(pool, key, self.pools[pool].record_bytes), f"{pool} {key!r}: another record was read"


def named(places: dict[str, Places[int]], given: dict[str, list[bytes]]) -> list[tuple[str, bytes, int]]:
    """Records as (pool, key, offset)."""
    return [(pool, given[pool][at], offset) for pool, of_pool in places.items() for at, offset in of_pool]
