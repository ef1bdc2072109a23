"""The records that reads from other workers are bringing, so that no second read misses them or brings them again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

from workers.kv.store.directory import Reservation

Keys = Mapping[str, Sequence[bytes]]
"""By pool, the keys of consecutive pages."""


class Arrivals:
    """The reads of one worker that are under way. Not thread-safe."""

    def __init__(self) -> None:
        self._reads: dict[tuple[str, bytes], asyncio.Future[bool]] = {}

    def of(self, wanted: Keys) -> set[asyncio.Future[bool]]:
        """The reads that bring some of these records. Each future ends with its read: whether it brought them."""
        names = ((pool, key) for pool, keys in wanted.items() for key in keys)
        return {self._reads[name] for name in names if name in self._reads}

    @contextmanager
    def announced(self, wanted: Keys, reservation: Reservation) -> Iterator[None]:
        """Meanwhile a read brings the records of a reservation, which was made for `wanted`."""
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        are_here = False
        names = [(pool, wanted[pool][index]) for pool, places in reservation.offsets.items() for index in places.names]
        self._reads |= dict.fromkeys(names, ended)
        try:
            yield
            are_here = True
        finally:
            for name in names:
                if self._reads.get(name) is ended:
                    del self._reads[name]
            ended.set_result(are_here)


async def have_come(reads: Set[asyncio.Future[bool]], timeout_s: float | None = None) -> bool:
    """Wait for reads; False if one of them failed, so that its records have to be read again."""
    if not reads:
        return True
    ended, _ = await asyncio.wait(reads, timeout=timeout_s)
    return all(read.result() for read in ended)
