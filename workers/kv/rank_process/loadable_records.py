"""What the requests of one rank may load, as the worker has told it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from workers.kv.rank_messages import Records, split

ByPool = Mapping[str, Mapping[str, int]]
"""By pool and key (hexadecimal, as the engine has it), the offset in the store."""


class LoadableRecords:
    """Records by request. They are removed only when no load reads them.

    `of`, `begin_load` and `end_load` are for the scheduler's thread, `allow` and `drop` for the link's thread.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, ByPool] = {}
        self._loading: set[str] = set()
        self._drops: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def of(self, rid: str) -> ByPool:
        """What a request may load."""
        return self._by_request.get(rid, {})

    def begin_load(self, rid: str) -> None:
        """The request's records are read from the store until `end_load`."""
        with self._lock:
            self._loading.add(rid)

    def end_load(self, rid: str) -> list[int]:
        """The request's load has ended, or was taken back. Returns the numbers of the drops that waited for it."""
        with self._lock:
            self._loading.discard(rid)
            return self._drops.pop(rid, [])

    def allow(self, rid: str, records: Mapping[str, Records]) -> None:
        """A request may load these records."""
        self._by_request[rid] = {
            pool: dict(zip((key.hex() for key in split(found.keys)), found.offsets, strict=True))
            for pool, found in records.items()
        }

    def drop(self, rid: str, number: int) -> bool:
        """A request loads nothing any more. False: a load still runs, and `end_load` returns the number."""
        self._by_request.pop(rid, None)
        with self._lock:
            if rid in self._loading:
                self._drops.setdefault(rid, []).append(number)
                return False
        return True
