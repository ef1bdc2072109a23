"""Keeps a process in Dynamo's discovery by files, where others delete entries that were not renewed for ten seconds.

A process that stood still for longer (a stopped process, a machine that slept) goes on without its entries. Dynamo
renews them and finds them gone, but does not write them again: callers would not find the process any more, although it
goes on to publish itself in the shared state.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ampd.supervised_task import InBackground, SupervisedTask

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_MISSED_LOOKS = 3
"""An entry that has just been written may not be listed yet."""

_FIRST_LOOK_S = 0.05
_FIRST_LOOKS = 200
"""Ten seconds in which the process runs. Dynamo writes the first entry some time after the endpoint is served."""

Entries = Callable[[], Iterable[tuple[Any, Any]]]
"""The endpoints that should be listed now, each with a client of itself."""


def deletes_silent_entries() -> bool:
    """Whether this process is in discovery by files. Elsewhere an entry lives as long as its process or its pod."""
    return os.environ.get("DYN_DISCOVERY_BACKEND") == "file"


class DiscoveryEntries(InBackground):
    """Looks for a process' own entries, and writes those again that are gone.

    Args:
        enter: writes the entries of an endpoint.
    """

    def __init__(self, entries: Entries, enter: Callable[[Any], Awaitable[None]]) -> None:
        self._entries = entries
        self._enter = enter
        self._task = SupervisedTask("discovery-entries", self._run)

    async def _run(self) -> None:
        missed = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            gone = [endpoint for endpoint, client in self._entries() if not is_listed(endpoint, client)]
            missed = missed + 1 if gone else 0
            if missed >= _MISSED_LOOKS:
                missed = 0
                log.warning("not in discovery any more, as after a standstill of this process: entering again")
                for endpoint in gone:
                    # It may have left while the one before was written.
                    if any(wanted is endpoint for wanted, _ in self._entries()):
                        await self._enter(endpoint)


async def until_listed(endpoint: Any, client: Any, enter: Callable[[Any], Awaitable[None]]) -> None:
    """Wait until callers find an endpoint that has just been served.

    The process may have stood still just then, so with discovery by files the entry is written again in the end.

    Args:
        client: of the endpoint itself.
        enter: writes its entries.
    """
    looks = 0
    while not is_listed(endpoint, client):
        await asyncio.sleep(_FIRST_LOOK_S)
        looks += 1
        if looks % _FIRST_LOOKS == 0 and deletes_silent_entries() and not is_listed(endpoint, client):
            log.warning("still not in discovery, as after a standstill of this process: entering again")
            await enter(endpoint)


def is_listed(endpoint: Any, client: Any) -> bool:
    """Whether callers find the endpoint of this process."""
    return endpoint.connection_id() in client.instance_ids()
