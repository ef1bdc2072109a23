"""Whether the frontends see this coordinator: only while there is a live decode worker.

Without a coordinator the frontends answer 503 ("not ready") at once, for every kind of request. A coordinator enters
discovery only while a decode worker lives. If it entered and left again, a request on its way could fail with 500.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ampd.background_tasks import InBackground, SupervisedTask
from ampd.discovery_entries import DiscoveryEntry

log = logging.getLogger(__name__)

_POLL_S = 0.05
_PRESENT_POLL_S = 0.25
"""In discovery, where a round is refused on its own until the coordinator has left."""
_RETRY_S = 1.0


class Presence(InBackground):
    """Enters and leaves Dynamo's discovery as `is_ready` changes, from the moment that the endpoint is served.

    Rounds in progress are not touched. Hand it to Dynamo's signal handlers in the endpoint's place, so that a
    coordinator that ends does not come back.

    Attributes:
        is_leaving: whether a signal has come.
    """

    def __init__(self, entry: DiscoveryEntry, is_ready: Callable[[], bool]) -> None:
        self._entry = entry
        self._is_ready = is_ready
        self.is_leaving = False
        self._has_entered = False
        self._task = SupervisedTask("presence", self._run)

    def wanted_entries(self) -> list[DiscoveryEntry]:
        """The coordinator's entry while it should be in discovery."""
        return [self._entry] if self._entry.is_present and not self.is_leaving else []

    async def until_ready(self) -> bool:
        """Wait until the endpoint may be served for the first time; False if the coordinator ends before that."""
        if not self._is_ready():
            log.info("no live decode worker yet: not in discovery until there is one")
        while not self.is_leaving and not self._is_ready():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return not self.is_leaving

    async def unregister_endpoint_instance(self) -> None:
        """Leave discovery for good."""
        self.is_leaving = True
        if not self._task.is_running:
            return  # it never entered
        await self.stop()
        await self._entry.unregister_endpoint_instance()

    async def _run(self) -> None:
        if not self._has_entered:
            await self._entry.until_listed()
            self._has_entered = True
        while True:
            is_ready = self._is_ready()
            if is_ready != self._entry.is_present:
                await self._change(is_ready)
            await asyncio.sleep(_PRESENT_POLL_S if self._entry.is_present else _POLL_S)

    async def _change(self, is_ready: bool) -> None:
        """Enter or leave; after a failure `_run` tries again. Until then each round is refused separately."""
        try:
            if is_ready:
                await self._entry.enter()
                log.info("there is a live decode worker: serving")
            else:
                await self._entry.leave()
                log.warning("no live decode worker: out of discovery until there is one")
        except Exception as error:
            log.warning("could not change the presence in discovery: %s", error)
            await asyncio.sleep(_RETRY_S)
            # The failed call may have had its effect, and Dynamo refuses to leave a second time.
            self._entry.look()
