"""Requests under which workers died: a request that ends two workers, or one engine twice, is not tried a third time.

The shared state counts the deaths under a prompt, and the write of a decision is refused if they are too many. So a
client may send the request again, to any coordinator. Rounds that ran beside it on both workers look the same, and are
refused for as long. While the shared state is away, only the deaths under one sending of a request are known.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cached_property
from hashlib import sha256

from ampd.keys import TOKEN_BYTES, tenant_key
from ampd.state.redis_store import StateStore
from ampd.state.schema import FATAL_DEATHS
from ampd.state.store import StateUnavailableError
from router.request import RoundRequest
from router.round_errors import RoundRefusedError, WorkerLostError

log = logging.getLogger(__name__)

_DIGEST_CHARS = 32


class WorkerDeaths:
    """The workers that died under rounds of this coordinator.

    Attributes:
        count: once per round that the worker had.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self.count = 0

    async def record(self, prompt_digest: str, death: str) -> int:
        """Return how many deaths are known under a prompt, with this one. 0: the shared state does not answer."""
        try:
            return await self._store.record_death(prompt_digest, death)
        except StateUnavailableError as error:
            log.warning("%s; other coordinators do not learn that a worker died under a request", error)
            return 0


class RequestDeaths:
    """The deaths under one round.

    Attributes:
        prompt_digest: names the prompt in the shared state. Each tenant has its own names, so that no refusal tells a
            tenant what another one has sent.
    """

    def __init__(self, deaths: WorkerDeaths, request: RoundRequest) -> None:
        self._deaths = deaths
        self._request = request
        self._names: set[str] = set()
        self._recorded: list[asyncio.Future[int]] = []

    @cached_property
    def prompt_digest(self) -> str:
        digest = sha256(tenant_key(self._request.tenant).encode())
        # Without the output that came before a process was lost.
        digest.update(memoryview(self._request.prompt)[: TOKEN_BYTES * self._request.client_prompt_tokens])
        return digest.hexdigest()[:_DIGEST_CHARS]

    def add(self, error: WorkerLostError) -> None:
        """A worker died while it ran the round."""
        self._deaths.count += 1
        name = f"{error.worker_id} {error.start or ''}"  # rounds that were lost together name the same death
        if name not in self._names:
            self._names.add(name)
            # The write of the next placement comes behind it, and is refused.
            self._recorded.append(asyncio.ensure_future(self._deaths.record(self.prompt_digest, name)))

    async def check(self) -> None:
        """Before the request is tried again.

        Raises:
            RoundRefusedError: it must not be.
        """
        known = [await recorded for recorded in self._recorded]
        if (deaths := max([len(self._names), *known])) >= FATAL_DEATHS:
            raise fatal(deaths)


def fatal(deaths: int) -> RoundRefusedError:
    """The refusal of a request under which so many workers died."""
    return RoundRefusedError(500, f"workers died {deaths} times while they ran this request; it is not tried again now")
