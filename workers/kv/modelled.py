"""The KV of a modelled engine: a store and a device without memory, and reads that take the modelled time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import takewhile

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism
from workers.kv.peer_reads import Remote
from workers.kv.shared import KvGeometry, PoolGeometry, Section
from workers.kv.store.directory import Loadable, StoreDirectory
from workers.kv.store.records import aligned_bytes
from workers.kv.store.sessions import Surplus

_POOL = "kv"


class ModelledStore:
    """A KV store without memory: which pages are stored is exact, and nothing that was computed is late.

    Args:
        store_tokens: size of the store.
        fingerprint: of the model and the page size.
        surplus: as the directory's.

    Attributes:
        changed: called when sessions may hold more or less than before.
    """

    def __init__(
        self,
        page_size: int,
        store_tokens: int,
        bytes_per_token: int,
        fingerprint: str = "",
        surplus: Surplus | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pool = PoolGeometry(_POOL, (Section(_POOL, heads=1, layers=1, head_bytes=page_size * bytes_per_token),))
        pages = max(1, store_tokens // page_size)
        size_bytes = pages * aligned_bytes(pool.record_bytes)
        self.capacity_tokens = pages * page_size
        self.place = 0, size_bytes
        self.geometry = KvGeometry(fingerprint, page_size, (pool,))
        self.directory = StoreDirectory(size_bytes, page_size, [pool], surplus)
        self.changed: Callable[[], None] = lambda: None
        self.in_place = None
        self._clock = clock

    async def open(self, timeout_s: float) -> None:
        """There are no ranks."""

    async def close(self) -> None:
        """There is no memory."""

    async def settle(self, timeout_s: float) -> None:
        """Nothing is late."""

    async def checksums(self, offsets: Mapping[str, Sequence[int]]) -> None:
        """There are no bytes."""

    def without_engine(self, tokens: int) -> ModelledStore:
        """A store of the same kind that no engine uses."""
        page_size, (pool,) = self.geometry.page_size, self.geometry.pools
        token_bytes, fingerprint = pool.record_bytes // page_size, self.geometry.fingerprint
        return ModelledStore(page_size, tokens + page_size, token_bytes, fingerprint, clock=self._clock)

    async def put(self, keys: Sequence[bytes]) -> None:
        """Store the pages of a context that nothing has computed."""
        self.write("", keys)

    def protect(self, rid: str, keys: Sequence[bytes]) -> Loadable:
        """Protect the stored part of a context until `unprotect`."""
        return self.directory.protect(rid, keys, self._clock())

    def unprotect(self, rid: str) -> None:
        """End the protection for a request."""
        self.directory.unprotect(rid)

    def begin(self, rid: str, session_id: str, keys: Sequence[bytes], *, is_copy: bool = False) -> None:
        """A request starts: what is stored of its context stays until `end`."""
        if session_id:
            self.directory.sessions.begin_request(session_id, keys, is_copy=is_copy)
        self.protect(rid, keys)
        self.changed()

    def write(self, session_id: str, keys: Sequence[bytes]) -> None:
        """Store the pages of a context that has been computed, unless the store has no room for them."""
        reservation = self.directory.reserve(session_id, {_POOL: keys}, self._clock())
        if reservation is not None:
            self.directory.written(reservation.id)
        self.changed()

    def end(self, rid: str, session_id: str, keys: Sequence[bytes]) -> None:
        """The request is over and left `keys` as the session's context."""
        if session_id:
            self.directory.sessions.end_request(session_id, keys)
        self.unprotect(rid)
        self.changed()


class ModelledTransport:
    """A `Transport` whose reads move nothing and take the modelled time."""

    def __init__(self, model: PerformanceModel, parallelism: Parallelism, bytes_per_token: int) -> None:
        self.metadata = str(parallelism.tp).encode()
        self._model = model
        self._parallelism = parallelism
        self._bytes_per_token = bytes_per_token

    def read(
        self,
        remote: Remote,
        theirs: Sequence[tuple[int, int]],  # noqa: ARG002 - nothing is moved
        ours: Sequence[tuple[int, int]],
    ) -> tuple[Future[int], Callable[[], None]]:
        """Start a read. Given up, it ends at once. Raises `ValueError` for a worker that tells no degree."""
        size = sum(block_bytes for _, block_bytes in ours)
        source = Parallelism(tp=int(remote.agent))
        seconds = self._model.kv_transfer_s(size // self._bytes_per_token, source, self._parallelism)
        done: Future[int] = Future()
        timer = asyncio.get_running_loop().call_later(seconds, done.set_result, size)

        def abandon() -> None:
            timer.cancel()
            done.cancel()

        return done, abandon

    def let_read(self, until_s: float) -> None:
        """Nothing has to be driven."""

    def close(self) -> None:
        """Nothing is open."""


class ModelledDevice:
    """Pages by key, without memory. Requests share pages. A page that no request uses stays until room is needed.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, capacity_tokens: int, page_size: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._page_size = page_size
        self._users: Counter[bytes] = Counter()
        self._cached: OrderedDict[bytes, None] = OrderedDict()

    @property
    def used_tokens(self) -> int:
        """Tokens of the pages that requests use; shared pages count once."""
        return len(self._users) * self._page_size

    def match(self, keys: Sequence[bytes]) -> int:
        """Length in pages of the longest prefix of `keys` that is here."""
        return sum(1 for _ in takewhile(lambda key: key in self._users or key in self._cached, keys))

    def admit(self, keys: Sequence[bytes], reserved_tokens: int, *, anyway: bool) -> bool:
        """Let a request use pages that are here, and make room for `reserved_tokens` beside all pages in use.

        Args:
            anyway: even if they do not fit.

        Returns:
            False: they do not fit, and nothing has changed.
        """
        new = sum(key not in self._users for key in keys)
        if not anyway and self.used_tokens + new * self._page_size + reserved_tokens > self._capacity_tokens:
            return False
        self.use(keys)
        self._shrink(reserved_tokens)
        return True

    def use(self, keys: Sequence[bytes]) -> None:
        """A request uses these pages, which are here or have just been computed or reloaded."""
        self._users.update(keys)
        for key in keys:
            self._cached.pop(key, None)

    def leave(self, keys: Sequence[bytes]) -> None:
        """A request needs these pages, which it has used, no more. The end of a context is the first to go."""
        for key in reversed(keys):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._cached[key] = None
        self._shrink(0)

    def _shrink(self, reserved_tokens: int) -> None:
        """Drop cached pages until `reserved_tokens` fit beside all others, the least recently used first."""
        room = (self._capacity_tokens - reserved_tokens) // self._page_size - len(self._users)
        while self._cached and len(self._cached) > room:
            self._cached.popitem(last=False)
