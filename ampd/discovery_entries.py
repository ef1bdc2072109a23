"""Keeps a process in Dynamo's discovery by files, where others delete entries that were not renewed for ten seconds.

A process that stood still for longer (a stopped process, a machine that slept) goes on without its entries. Dynamo
renews them and finds them gone, but does not write them again: callers would not find the process any more, although it
goes on to publish itself in the shared state.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from ampd.background_tasks import InBackground, SupervisedTask

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_MISSED_LOOKS = 3
"""An entry that has just been written may not be listed yet."""

_FIRST_LOOK_S = 0.05
_FIRST_LOOKS = 200
"""Ten seconds in which the process runs. Dynamo writes the first entry some time after the endpoint is served."""

_FOLDER = "DYN_FILE_KV"
_DEFAULT_FOLDER = "dynamo_store_kv"
_CARDS, _INSTANCES = "v1/mdc", "v1/instances"


def deletes_silent_entries() -> bool:
    """Whether this process is in discovery by files. Elsewhere an entry lives as long as its process or its pod."""
    return os.environ.get("DYN_DISCOVERY_BACKEND") == "file"


class DiscoveryEntry:
    """An endpoint of this process in discovery. Only this object writes and deletes the entry.

    Changes come one after the other, and each that has begun ends, even if its caller is cancelled. Otherwise an entry
    that is still being written could come after it was to go. Hand the object to Dynamo's graceful shutdown in the
    endpoint's place, so that an endpoint that has left for good does not come back.

    Args:
        write: enters the endpoint; None: by its own entry alone.
        has_card: whether the model's card is there too, for an endpoint that has one.

    Attributes:
        is_present: it was entered, and has not left since.
    """

    def __init__(
        self,
        endpoint: Any,
        write: Callable[[], Awaitable[None]] | None = None,
        has_card: Callable[[], bool] = lambda: True,
    ) -> None:
        self._endpoint = endpoint
        self._write = write or endpoint.register_endpoint_instance
        self._has_card = has_card
        self._client: Any = None
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._has_left = False
        self.is_present = False

    async def connect(self) -> None:
        """Begin to watch discovery. Without effect if it was begun before.

        A client that is dropped leaves its watch behind, which complains at every change of the cluster.
        """
        if self._client is None:
            self._client = await self._endpoint.client()

    def is_listed(self) -> bool:
        """Whether callers find the endpoint, and frontends its model. Only after `connect`."""
        return self._is_found() and self._has_card()

    def look(self) -> None:
        """Learn whether a change that failed has had its effect. Only after `connect`."""
        self.is_present = self._is_found()

    async def until_listed(self) -> None:
        """Wait until callers find the endpoint that has just been served.

        The process may have stood still just then, so with discovery by files the entry is written again in the end.
        """
        await self.connect()
        looks = 0
        while not self.is_listed():
            await asyncio.sleep(_FIRST_LOOK_S)
            looks += 1
            if looks % _FIRST_LOOKS == 0 and deletes_silent_entries() and not self.is_listed():
                log.warning("still not in discovery, as after a standstill of this process: entering again")
                await self.enter()
        self.is_present = not self._has_left

    async def enter(self) -> None:
        """Write the entry, unless the endpoint has left for good."""
        await self._in_turn(self._enter)

    async def enter_again(self) -> None:
        """Write the entry that others have deleted, unless the endpoint has left meanwhile."""
        await self._in_turn(self._enter_again)

    async def leave(self) -> None:
        """Delete the entry. Dynamo refuses to delete one that is not there."""
        await self._in_turn(self._leave)

    async def unregister_endpoint_instance(self) -> None:
        """Leave for good."""
        self._has_left = True
        await self.leave()

    def _is_found(self) -> bool:
        return self._endpoint.connection_id() in self._client.instance_ids()

    async def _enter(self) -> None:
        if not self._has_left:
            await self._write()
            self.is_present = True

    async def _enter_again(self) -> None:
        if self.is_present:
            await self._enter()

    async def _leave(self) -> None:
        await self._endpoint.unregister_endpoint_instance()
        self.is_present = False

    async def _in_turn(self, change: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            async with self._changing:
                await change()

        task = asyncio.create_task(run())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)


class DiscoveryEntries(InBackground):
    """Looks for a process' own entries, and writes those again that are gone.

    Args:
        wanted: those that should be listed now.
        peers: endpoint, as `namespace/component/name`, of processes whose entries go when they die; "": none do.
    """

    def __init__(self, wanted: Callable[[], Iterable[DiscoveryEntry]], peers: str = "") -> None:
        self._wanted = wanted
        self._peers = peers
        self._task = SupervisedTask("discovery-entries", self._run)

    async def _run(self) -> None:
        missed = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._peers:
                await delete_dead(self._peers)
            gone = [entry for entry in self._wanted() if not entry.is_listed()]
            missed = missed + 1 if gone else 0
            if missed >= _MISSED_LOOKS:
                missed = 0
                log.warning("not in discovery any more, as after a standstill of this process: entering again")
                for entry in gone:
                    await entry.enter_again()


async def delete_dead(endpoint: str) -> None:
    """Delete the entries of processes that have died: nothing listens at their port.

    Frontends would send them the rounds of their sessions until Dynamo deletes the entries, after ten seconds.
    """
    for file in _folder().glob(f"{_INSTANCES}/{endpoint.replace('/', '%2F')}%2F*"):
        try:
            host, _, port = json.loads(file.read_bytes())["transport"]["tcp"].partition("/")[0].rpartition(":")
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
        except ConnectionRefusedError:
            log.warning("%s has died, and goes from discovery", file.name)
            for entry in _folder().glob(f"v1/*/{file.name}"):
                entry.unlink(missing_ok=True)
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            continue  # it is gone, or just being written


def has_card(connection_id: int) -> bool:
    """Whether a process' card of the model is in discovery by files. The file's name ends with the process' id.

    A card that was written while the disk was full is none. True without that folder: what is written to a new one
    would not be found.
    """
    try:
        own = (file for file in (_folder() / _CARDS).iterdir() if file.name.endswith(f"%2F{connection_id:x}"))
        return any(json.loads(file.read_bytes()) for file in own)
    except OSError:
        return True
    except ValueError:
        return False


def _folder() -> Path:
    return Path(os.environ.get(_FOLDER) or Path(tempfile.gettempdir(), _DEFAULT_FOLDER))
