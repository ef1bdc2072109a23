"""Requests under which workers died: a request that ends two workers is not given to a third."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b

from router.round_errors import RoundRefusedError

FATAL_DEATHS = 2
"""Workers that may die under one request. One death may be a coincidence, and the request is tried once more."""

MEMORY_S = 600.0
"""Seconds for which a request under which a worker died is remembered."""

_MAX_REMEMBERED = 4096


class WorkerDeaths:
    """The workers that died lately, by the requests that they ran. A replica of the coordinator knows its own only.

    Attributes:
        count: deaths, once per round that the worker had.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers: dict[str, set[str]] = {}
        self._expiries_s: dict[str, float] = {}
        self.count = 0

    def of_request(self, request_id: str, prompt: bytes) -> RequestDeaths:
        """The deaths under a request. `prompt`: its packed token ids."""
        return RequestDeaths(self, request_id, prompt)

    def add(self, keys: tuple[str, ...], worker_id: str) -> None:
        """A worker died under a request with these names."""
        self.count += 1
        self._forget_old()
        for key in keys:
            workers = self._workers.pop(key, set())
            self._workers[key] = workers | {worker_id}  # at the end: the order is that of the expiry
            self._expiries_s[key] = self._clock() + MEMORY_S
        while len(self._workers) > _MAX_REMEMBERED:
            self.forget(next(iter(self._workers)))

    def most(self, keys: tuple[str, ...]) -> int:
        """Workers that died under one of these names, the largest number of them."""
        self._forget_old()
        return max(len(self._workers.get(key, ())) for key in keys)

    def forget(self, *keys: str) -> None:
        """A request with these names was served, or is too old."""
        for key in keys:
            if self._workers.pop(key, None) is not None:
                del self._expiries_s[key]

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._workers and self._expiries_s[oldest := next(iter(self._workers))] <= now_s:
            self.forget(oldest)

    def __len__(self) -> int:
        return len(self._workers)


class RequestDeaths:
    """The deaths under one request, which is known by its id and by its prompt, because clients send it again."""

    def __init__(self, deaths: WorkerDeaths, request_id: str, prompt: bytes) -> None:
        self._deaths = deaths
        self._request_id = request_id
        self._prompt = prompt

    def check(self) -> None:
        """Refuse the request if too many workers died under it.

        Raises:
            RoundRefusedError: 500.
        """
        if not self._deaths:
            return  # the usual case takes no hash of the prompt
        count = self._deaths.most(self._keys())
        if count >= FATAL_DEATHS:
            raise RoundRefusedError(500, f"{count} workers died while they ran this request; it is not tried again")

    def add(self, worker_id: str) -> None:
        """A worker died while it ran the request.

        Raises:
            RoundRefusedError: 500 if the request must not be tried again.
        """
        self._deaths.add(self._keys(), worker_id)
        self.check()

    def survived(self) -> None:
        """The request was served to its end, so that the deaths were not its fault."""
        if self._deaths:
            self._deaths.forget(*self._keys())

    def _keys(self) -> tuple[str, str]:
        return f"id {self._request_id}", f"prompt {blake2b(self._prompt, digest_size=16).hexdigest()}"
