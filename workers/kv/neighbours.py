"""The stores of neighbours: other workers of this host and user, whose records are read where they lie."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from ampd.background_tasks import BackgroundTasks
from workers.kv.shared import NEIGHBOUR_BYTES, Place, StoreMemory

log = logging.getLogger(__name__)

_MAP_S = 0.2
"""A read waits so long for a mapping. To pin a large store takes longer; then the read goes over NIXL."""

_PIECE_BYTES = 8 << 20
"""Between two pieces a copy looks whether it was given up."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True, eq=False)
class _Neighbour:
    """The store of a worker. `bytes`: None until it is mapped everywhere, and for ever if it cannot be."""

    number: int
    mapped: asyncio.Future[None]
    process: int = -1
    bytes: Bytes | None = None


class Neighbours:
    """Maps the stores of neighbours in this process and in the ranks of its engine, until their process ends.

    Args:
        map_on_ranks: returns why a rank cannot map a store, in one line, or an empty text; raises `ConnectionError`.
        unmap_on_ranks: raises `ConnectionError`.
    """

    def __init__(
        self, map_on_ranks: Callable[[int, Place], Awaitable[str]], unmap_on_ranks: Callable[[int], None]
    ) -> None:
        self._map_on_ranks = map_on_ranks
        self._unmap_on_ranks = unmap_on_ranks
        self._numbers = count(1)
        self._by_place: dict[Place, _Neighbour] = {}
        self._tasks = BackgroundTasks()
        self._copying = ThreadPoolExecutor(1, "ampd-kv-neighbour")

    async def first_offset(self, worker_id: str, place: Place) -> int | None:
        """The offset at which a worker's store begins here and on all ranks; None: it is not mapped, or not yet."""
        neighbour = self._by_place.get(place)
        if neighbour is None:
            neighbour = _Neighbour(next(self._numbers), asyncio.get_running_loop().create_future())
            self._by_place[place] = neighbour
            self._tasks.spawn(self._map(worker_id, place, neighbour))
            await asyncio.wait({neighbour.mapped}, timeout=_MAP_S)
        return None if neighbour.bytes is None else neighbour.number * NEIGHBOUR_BYTES

    def at(self, offset: int) -> tuple[Bytes, int]:
        """The store in which an offset lies, and its place there. Raises `ConnectionError`: it has gone."""
        number, place = divmod(offset, NEIGHBOUR_BYTES)
        for neighbour in self._by_place.values():
            if neighbour.number == number and neighbour.bytes is not None:
                return neighbour.bytes, place
        raise ConnectionError("the worker has gone")

    def copy(
        self, theirs: Sequence[tuple[int, int]], ours: Sequence[tuple[int, int]], memory: StoreMemory
    ) -> tuple[Future[int], Callable[[], None]]:
        """Copy blocks (offset, bytes) of neighbours to the worker's own store, in a thread, as `Transport.read`."""
        own = np.frombuffer(memory.map, np.uint8)
        parts = [(*self.at(offset), at, size) for (offset, size), (at, _) in zip(theirs, ours, strict=True)]
        is_over: list[bool] = []

        def copy() -> int:
            for source, first, at, size in parts:
                for done in range(0, size, _PIECE_BYTES):
                    if is_over:
                        return 0  # nobody waits for it
                    piece = min(_PIECE_BYTES, size - done)
                    own[at + done : at + done + piece] = source[first + done : first + done + piece]
            return sum(size for _, _, _, size in parts)

        return self._copying.submit(copy), lambda: is_over.append(True)

    async def forget(self) -> None:
        """Let all mappings go: the ranks have ended, or end."""
        await self._tasks.cancel()
        for place in list(self._by_place):
            self._gone(place)

    async def close(self) -> None:
        """Let all mappings go, for good."""
        await self.forget()
        await asyncio.to_thread(self._copying.shutdown)

    async def _map(self, worker_id: str, place: Place, neighbour: _Neighbour) -> None:
        try:
            neighbour.process = os.pidfd_open(place[0])
            asyncio.get_running_loop().add_reader(neighbour.process, self._gone, place)
            memory = StoreMemory.of_neighbour(*place)
            refusal = await self._map_on_ranks(neighbour.number, place)
            if not refusal:
                neighbour.bytes = np.frombuffer(memory.map, np.uint8)
            memory.close()  # the array keeps the mapping
        except (OSError, ValueError) as error:
            refusal = str(error)
        finally:
            neighbour.mapped.set_result(None)
        if refusal:
            log.warning("KV of worker %s goes over NIXL, although it is on this host: %s", worker_id, refusal)
            with suppress(ConnectionError):
                self._unmap_on_ranks(neighbour.number)

    def _gone(self, place: Place) -> None:
        """A neighbour has ended. Copies that run keep its memory until they end."""
        neighbour = self._by_place.pop(place)
        if neighbour.process >= 0:
            asyncio.get_running_loop().remove_reader(neighbour.process)
            os.close(neighbour.process)
        if neighbour.bytes is not None:
            with suppress(ConnectionError):
                self._unmap_on_ranks(neighbour.number)
