"""Requests under which workers died: a request that ends two workers, or one engine twice, is not tried a third time.

Other rounds may have run on the same workers, and lost them too. None of them can be told from the request that is to
blame. All are refused, but a client that sends such a round again is served after a pause, which grows with each death.
The round that is served is innocent. A request that is left alone is refused for `MEMORY_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b

from ampd.session_key import tenant_key
from ampd.state.store import DeathNews, RequestServed, WorkerDied
from ampd.wire import with_retry_after
from router.round_errors import RoundRefusedError

log = logging.getLogger(__name__)

FATAL_DEATHS = 2
"""Deaths after which a request is refused, of two workers or of one whose engine starts again.

One death may be a coincidence, and the request is tried once more."""

MEMORY_S = 600.0
"""Seconds for which a request under which a worker died is remembered."""

SHARED_PAUSE_S = 10.0
"""Pause after the second death of a request that shares its deaths with others; each further death doubles it."""

TOLD_S = 0.5
"""Longest wait until the other coordinators know of a death. Without the shared state they never do."""

_MAX_REMEMBERED = 4096
_PROMPT = "prompt "

_Death = tuple[str, int | None]
"""(worker, start of its engine): rounds that were lost together name the same death, a later start another one."""


def _name(death: WorkerDied) -> _Death:
    return death.worker_id, death.start


class WorkerDeaths:
    """The workers that died lately, by the requests that they ran.

    Coordinators announce deaths to each other, because a request may come to another one: a client sends it again, or
    its coordinator dies as well. A coordinator that does not hear the shared state just then knows its own deaths only.

    Args:
        announce: tells the other coordinators of a death, or that such a request was served.

    Attributes:
        count: deaths under requests of this coordinator, once per round that the worker had.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, announce: Callable[[DeathNews], None] = lambda _: None
    ) -> None:
        self._clock = clock
        self._announce = announce
        self._deaths: dict[str, set[_Death]] = {}
        self._expiries_s: dict[str, float] = {}
        self._awaited: dict[WorkerDied, asyncio.Event] = {}
        self.count = 0

    def of_request(self, request_id: str, prompt: bytes, tenant: str = "") -> RequestDeaths:
        """The deaths under a request.

        Args:
            prompt: its packed token ids.
            tenant: see `ampd.tenant`. No refusal tells a tenant what another one has sent.
        """
        return RequestDeaths(self, request_id, prompt, tenant)

    def add(self, death: WorkerDied) -> asyncio.Event:
        """A worker died under a request of this coordinator.

        Returns:
            It is set when the announcement comes back, which goes to all coordinators at once.
        """
        self.count += 1
        self._note(death)
        echo = self._awaited.setdefault(death, asyncio.Event())
        while len(self._awaited) > _MAX_REMEMBERED:
            del self._awaited[next(iter(self._awaited))]
        self._announce(death)
        return echo

    def announced(self, news: DeathNews) -> None:
        """A coordinator, perhaps this one, has announced a death, or that a request was served."""
        match news:
            case WorkerDied():
                self._learn(news)
                if echo := self._awaited.pop(news, None):
                    echo.set()
            case RequestServed(request):
                self.forget(*request)

    def _learn(self, death: WorkerDied) -> None:
        name = _name(death)
        if any(name not in self._deaths.get(key, ()) for key in death.request):
            # Each of the worker's rounds is announced, but the worker died once.
            if not any(name in deaths for deaths in self._deaths.values()):
                log.warning("worker %s died under a request of another coordinator", death.worker_id)
            self._note(death)

    def _note(self, death: WorkerDied) -> None:
        self._forget_old()
        for key in death.request:
            deaths = self._deaths.pop(key, set())
            self._deaths[key] = deaths | {_name(death)}  # at the end: the order is that of the expiry
            self._expiries_s[key] = self._clock() + MEMORY_S
        while len(self._deaths) > _MAX_REMEMBERED:
            self.forget(next(iter(self._deaths)))

    def most(self, keys: tuple[str, ...]) -> int:
        """The deaths under the name, of these, that has most of them."""
        self._forget_old()
        return max(len(self._deaths.get(key, ())) for key in keys)

    def pause_s(self, key: str) -> float:
        """For how much longer a request with this name that shares its deaths with others must not be tried."""
        died_s = self._expiries_s[key] - MEMORY_S
        pause_s = min(MEMORY_S, SHARED_PAUSE_S * 2.0 ** (self.most((key,)) - FATAL_DEATHS))
        return max(0.0, died_s + pause_s - self._clock())

    def is_shared(self, key: str) -> bool:
        """Whether a request with another prompt has lost all the workers that this one has lost."""
        own = self._deaths.get(key, set())
        return any(other != key and other.startswith(_PROMPT) and lost >= own for other, lost in self._deaths.items())

    def served(self, keys: tuple[str, ...]) -> None:
        """A request with these names was served to its end."""
        if any(key in self._deaths for key in keys):
            self.forget(*keys)
            self._announce(RequestServed(keys))

    def forget(self, *keys: str) -> None:
        """A request with these names was served, or is too old."""
        for key in keys:
            if self._deaths.pop(key, None) is not None:
                del self._expiries_s[key]

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._deaths and self._expiries_s[oldest := next(iter(self._deaths))] <= now_s:
            self.forget(oldest)

    def __len__(self) -> int:
        return len(self._deaths)


class RequestDeaths:
    """The deaths under one request of a tenant. Its id and its prompt name it, because clients send it again."""

    def __init__(self, deaths: WorkerDeaths, request_id: str, prompt: bytes, tenant: str) -> None:
        self._deaths = deaths
        self._request_id = request_id
        self._prompt = prompt
        self._tenant = tenant
        self._echoes: list[asyncio.Event] = []

    def check(self) -> None:
        """Refuse the request if too many workers died under it.

        Raises:
            RoundRefusedError: 500, or 503 if other requests may be to blame.
        """
        if not self._deaths:
            return  # the usual case takes no hash
        request_id, prompt = self._keys()
        count = self._deaths.most((request_id, prompt))
        if count < FATAL_DEATHS:
            return
        if not self._deaths.is_shared(prompt) or self._deaths.most((request_id,)) >= FATAL_DEATHS:
            raise RoundRefusedError(
                500, f"workers died {count} times while they ran this request; it is not tried again"
            )
        if pause_s := self._deaths.pause_s(prompt):
            died = f"workers died {count} times while they ran this request and others"
            raise RoundRefusedError(503, with_retry_after(died, pause_s))

    def add(self, worker_id: str, start: int | None = None) -> None:
        """A worker died while it ran the request.

        Args:
            start: see `WorkerDied`.

        Raises:
            RoundRefusedError: the request must not be tried again now, see `check`.
        """
        self._echoes.append(self._deaths.add(WorkerDied(worker_id, self._keys(), start)))
        self.check()

    async def told(self) -> None:
        """Wait until the other coordinators know, before the client does, at most for `TOLD_S`.

        A client that sends the request again at once may reach any of them.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(TOLD_S):
                for echo in self._echoes:
                    await echo.wait()

    def survived(self) -> None:
        """The request was served to its end, so that the deaths were not its fault."""
        if self._deaths:
            self._deaths.served(self._keys())

    def _keys(self) -> tuple[str, str]:
        prompt = blake2b(self._prompt, digest_size=16).hexdigest()
        tenant = tenant_key(self._tenant)
        return f"id {tenant} {self._request_id}", f"{_PROMPT}{tenant} {prompt}"
