"""Pages that were read from peers and wait in staging memory for the engine, by request."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class StagedPages:
    """Which staging pages hold which keys for which request.

    A request's pages are removed only when the engine does not copy them. `count`, `begin_load` and `end_load` are for
    the engine's thread; the other methods are for the keeper's thread.
    """

    def __init__(self) -> None:
        self._pages: dict[str, dict[str, int]] = {}
        self._loading: set[str] = set()
        self._removals: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def count(self, rid: str, keys: Sequence[str]) -> int:
        """How many of the first `keys` (hexadecimal, as the engine has them) are staged for request `rid`."""
        held = self._pages.get(rid)
        if not held:
            return 0
        return next((at for at, key in enumerate(keys) if key not in held), len(keys))

    def begin_load(self, rid: str, keys: Sequence[str]) -> list[int] | None:
        """Staging pages of `keys`, which stay until `end_load`; None if they have gone meanwhile."""
        with self._lock:
            held = self._pages.get(rid)
            if held is None or any(key not in held for key in keys):
                return None
            self._loading.add(rid)
            return [held[key] for key in keys]

    def end_load(self, rid: str) -> None:
        """The engine has copied the pages, or will not."""
        with self._lock:
            self._loading.discard(rid)

    def add(self, rid: str, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Stage pages for a request."""
        self._pages[rid] = {key.hex(): page for key, page in zip(keys, pages, strict=True)}

    def remove(self, rid: str, number: int) -> None:
        """Remove a request's pages. `number`: of the message that asked for it; see `take_removed`."""
        with self._lock:
            self._pages.pop(rid, None)
        self._removals.setdefault(rid, []).append(number)

    def take_removed(self, rid: str) -> list[int]:
        """Numbers of the messages that can be answered, because the engine no longer copies the request's pages."""
        return [] if rid in self._loading else self._removals.pop(rid, [])

    def clear(self) -> list[int]:
        """Forget all pages; returns the numbers of the messages that wait for a removal."""
        with self._lock:
            self._pages.clear()
            self._loading.clear()
        numbers = [number for numbers in self._removals.values() for number in numbers]
        self._removals.clear()
        return numbers
