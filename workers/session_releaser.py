"""Releases the KV of sessions that have ended or are idle, but never of a session with a running round.

Ends the bindings of sessions whose last round this worker has answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ampd.background_tasks import InBackground, SupervisedTask
from ampd.state.redis_store import StateStore
from ampd.state.store import Binding, StateUnavailableError
from workers.kv.exchange import KvExchange

log = logging.getLogger(__name__)
_MAX_SWEEP_S = 15.0
_AGAIN_S = 1.0
_MOST_ENDED = 10_000
"""Sessions whose ends wait for the shared state, at most. The bindings of others expire."""


class SessionEnds(InBackground):
    """Tells the shared state which sessions have ended, however long it does not answer.

    The decode worker of the last round does this and not its coordinator, because the KV is here: if this process dies,
    little is left of the session, and a coordinator has no duty that outlives its rounds.
    """

    def __init__(self, store: StateStore, worker_id: str) -> None:
        self._store = store
        self._worker_id = worker_id
        self._ended: OrderedDict[str, Binding] = OrderedDict()
        self._changed = asyncio.Event()
        self._task = SupervisedTask("session-ends", self._run)

    def __len__(self) -> int:
        return len(self._ended)

    def begins(self, session_id: str) -> None:
        """A round of the session is here: if the session has ended, it lives again."""
        self._ended.pop(session_id, None)

    def ended(self, session_id: str, epoch: int) -> None:
        """The session's last round has ended. `epoch`: of the binding under which it ran."""
        if len(self._ended) < _MOST_ENDED:
            self._ended[session_id] = Binding(session_id, self._worker_id, epoch)
            self._changed.set()

    async def _run(self) -> None:
        self._changed.set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._tell()
            except StateUnavailableError:
                await asyncio.sleep(_AGAIN_S)
                self._changed.set()

    async def _tell(self) -> None:
        while self._ended:
            session_id, binding = next(iter(self._ended.items()))
            self._ended.move_to_end(session_id)  # one that fails lets the others go first
            await self._store.end_session(session_id, last=binding)
            self._ended.pop(session_id, None)

    async def stop(self) -> None:
        """Tell what is left, if the shared state answers."""
        await super().stop()
        with suppress(StateUnavailableError):
            await self._tell()


@dataclass(slots=True)
class _Use:
    """A session here.

    Attributes:
        rounds: those here; at least 2 if it had one elsewhere.
        is_copy: another worker owns it, as far as its rounds here show.
        is_held: some of its KV is here.
    """

    running: int = 0
    rounds: int = 0
    last_s: float = 0.0
    release: bool = False
    is_copy: bool = False
    is_held: bool = False


class SessionReleaser:
    """Releases the KV of sessions that were ended, or that had no round for `ttl_s` seconds.

    Args:
        first_ttl_s: the same for sessions that have had one round, if it is less.

    Attributes:
        expired: sessions that were released because they were idle for too long.
        evicted: sessions of this worker that lost their KV between two rounds without being released.
    """

    def __init__(
        self,
        kv: KvExchange[Any],
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        first_ttl_s: float = float("inf"),
    ) -> None:
        self._kv = kv
        self._ttl_s = ttl_s
        self._first_ttl_s = min(first_ttl_s, ttl_s)
        self._clock = clock
        self._uses: OrderedDict[str, _Use] = OrderedDict()
        self.expired = 0
        self.evicted = 0

    @asynccontextmanager
    async def round(
        self, session_id: str, *, is_copy: bool = False, has_context: bool = False, is_last: bool = False
    ) -> AsyncIterator[None]:
        """Mark a round of the session as running during the block. A release that came meanwhile happens at its end.

        Args:
            is_copy: the round is only prefilled here. The session belongs to another worker.
            has_context: the session had a round before, perhaps at another owner.
            is_last: the session ends with this round, and is released with it.
        """
        use = self._uses.setdefault(session_id, _Use())
        use.is_copy = is_copy
        use.running += 1
        use.rounds = max(use.rounds + 1, 2 if has_context else 1)
        use.release = is_last
        try:
            yield
        finally:
            use.running -= 1
            use.last_s = self._clock()
            self._uses.move_to_end(session_id)
            if use.release and not use.running:
                await self._drop(session_id)

    async def release(self, session_id: str) -> int:
        """Release a session now, or (0 for the moment) when its last running round has ended; returns tokens."""
        use = self._uses.get(session_id)
        if use and use.running:
            use.release = True
            return 0
        return await self._drop(session_id)

    def is_running(self, session_id: str) -> bool:
        """Whether a round of the session runs here."""
        use = self._uses.get(session_id)
        return use is not None and use.running > 0

    def held(self, session_id: str, tokens: int) -> None:
        """The KV exchange holds `tokens` of a session now; 0: none any more."""
        use = self._uses.get(session_id)
        if use is not None:
            was_held, use.is_held = use.is_held, tokens > 0
            if was_held and not tokens and not use.running and not use.is_copy:
                self.evicted += 1
        if tokens and use is None:
            # Pages that the engine offered long after the session's release. No round would end their time.
            self._uses[session_id] = _Use(last_s=self._clock())

    async def release_idle(self) -> list[str]:
        """Release every session that has been idle for longer than the TTL; returns their ids."""
        released = []
        for session_id in [name for name, use in self._uses.items() if self._is_idle(use)]:
            # A round of it may have begun during the release of another one.
            use = self._uses.get(session_id)
            if use is not None and self._is_idle(use):
                await self.release(session_id)
                released.append(session_id)
        self.expired += len(released)
        return released

    def _is_idle(self, use: _Use) -> bool:
        ttl_s = self._ttl_s if use.rounds > 1 else self._first_ttl_s
        return not use.running and use.last_s <= self._clock() - ttl_s

    async def run(self) -> None:
        """Release idle sessions until cancelled."""
        while True:
            await asyncio.sleep(min(self._first_ttl_s / 4, _MAX_SWEEP_S))
            for session_id in await self.release_idle():
                log.info("released the KV of session %s: no round for too long", session_id)

    async def _drop(self, session_id: str) -> int:
        self._uses.pop(session_id, None)
        return await self._kv.release_session(session_id)
