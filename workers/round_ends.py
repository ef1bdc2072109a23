"""What this worker tells coordinators of their rounds, over one connection to each of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

from ampd.background_tasks import InBackground, SupervisedTask
from ampd.call_signatures import Signer
from ampd.round_end import RUNNING_S, Begun, RoundEnded, Running, Told, encode_told

log = logging.getLogger(__name__)

_TRIES, _PAUSE_S = 20, 0.25
_BEGUN_S = 0.005
_MOST_WAITING = 4096
"""Messages that wait for a connection. What a coordinator misses it learns from the list of rounds that run."""


class RoundEnds(InBackground):
    """Tells coordinators. No method but `stop` waits."""

    def __init__(self, worker_id: str, signer: Signer) -> None:
        self._worker_id = worker_id
        self._signer = signer
        self._links: dict[str, _Link] = {}
        self._task = SupervisedTask("running-rounds", self._run)

    def begins(self, address: str, request_id: str) -> None:
        """This worker has a round of the coordinator at `address` until its end is told."""
        link = self._links.get(address)
        if link is None or link.is_given_up:
            link = self._links[address] = _Link(address, self._worker_id, self._signer)
        link.running[request_id] += 1
        # Not at once, because it would delay the round. A short one is over by then.
        asyncio.get_running_loop().call_later(_BEGUN_S, link.tell_begun, request_id)

    def tell(self, address: str, told: Told) -> None:
        """Tell more of a round. Nothing happens if its coordinator has gone since."""
        if (link := self._links.get(address)) is not None:
            link.tell(told)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(RUNNING_S)
            for address, link in list(self._links.items()):
                if link.is_given_up and not link.running:
                    del self._links[address]
                else:
                    link.tell_running()

    async def stop(self) -> None:
        await super().stop()
        for link in self._links.values():
            await link.close()


class _Link(asyncio.Protocol):
    """A connection to one coordinator.

    Attributes:
        running: the rounds that this worker has for it. A frontend may send one again before its first try has ended.
        is_given_up: the coordinator cannot be reached.
    """

    def __init__(self, address: str, worker_id: str, signer: Signer) -> None:
        self._address = address
        self._worker_id = worker_id
        self._signer = signer
        self._waiting: list[Told] = []
        self._transport: Any = None
        self._connecting: asyncio.Task[None] | None = None
        self.running = Counter[str]()
        self.is_given_up = False

    def tell(self, told: Told) -> None:
        if isinstance(told, RoundEnded):
            self.running[told.request_id] -= 1
            if self.running[told.request_id] <= 0:
                del self.running[told.request_id]
        if self._transport is not None:
            self._send(told)
            return
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(told)
        self._begin_to_connect()

    def tell_begun(self, request_id: str) -> None:
        if request_id in self.running:
            self.tell(Begun(request_id))

    def tell_running(self) -> None:
        """Tell which rounds there are, as a new connection does first."""
        if self._transport is None:
            self._begin_to_connect()
        else:
            self._send(Running(self._worker_id, [*self.running]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        waiting, self._waiting = self._waiting, []
        ended = (told.request_id for told in waiting if isinstance(told, RoundEnded))
        for told in (Running(self._worker_id, [*self.running, *ended]), *waiting):
            self._send(told)

    def _send(self, told: Told) -> None:
        self._transport.write(encode_told(told, self._signer, self._address))

    def _begin_to_connect(self) -> None:
        if self._connecting is None and not self.is_given_up:
            self._connecting = asyncio.create_task(self._connect())

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None

    async def _connect(self) -> None:
        host, _, port = self._address.rpartition(":")
        try:
            for _ in range(_TRIES):
                try:
                    await asyncio.get_running_loop().create_connection(lambda: self, host, int(port))
                except OSError:
                    await asyncio.sleep(_PAUSE_S)
                else:
                    return
            self.is_given_up = True
            log.warning("the coordinator at %s cannot be reached: it is not told how its rounds end", self._address)
        finally:
            self._connecting = None

    async def close(self) -> None:
        """Send what waits, and end the connection."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        if self._transport is not None:
            self._transport.close()
