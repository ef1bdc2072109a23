"""What an operator asks a coordinator about sessions, at its system port."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

from ampd.keys import session_key
from benchmarks.fuzz.mutations import changed
from benchmarks.fuzz.target import Target
from router.session_control import SessionControl
from tests.router.replica_lab import Replica, cluster, worker

_ID = "agent-7"
_KEY = session_key("", _ID)
_REQUESTS: tuple[dict[str, Any], ...] = (
    {"session_id": _ID, "tenant": ""},
    {"session_key": _KEY},
    {"session_id": "another", "tenant": "t"},
    {"limit": 10},
)


class FuzzedSessions:
    """A coordinator with one live session, and the event loop that it runs on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._replica = self._loop.run_until_complete(self._start())

    async def _start(self) -> Replica:
        replica = Replica(await cluster(worker("d1")), "always-local")
        return await replica.__aenter__()

    def close(self) -> None:
        """Stop the coordinator."""
        self._loop.run_until_complete(self._replica.__aexit__())
        self._loop.close()

    def targets(self) -> Iterator[Target]:
        """The operations."""
        # A body that is no object ends in Dynamo's own answer, with status 500.
        yield Target("session request", _request, self._run, (AttributeError,))

    def _run(self, given: tuple[str, Any]) -> None:
        self._loop.run_until_complete(self._ask(*given))

    async def _ask(self, operation: str, request: Any) -> None:
        replica = self._replica
        if await replica.store.binding(_KEY) is None:
            await replica.round(_ID)
        answer = await getattr(SessionControl(replica.services), operation)(request)
        await asyncio.gather(*replica.tasks)
        replica.tasks.clear()
        json.dumps(answer, allow_nan=False)
        ends = operation == "end" and "error" not in answer and _names_it(request)
        assert (await replica.store.binding(_KEY) is None) == ends


def _request(rng: random.Random) -> tuple[str, Any]:
    request = rng.choice(_REQUESTS)
    return rng.choice(("list", "show", "end")), changed(rng, request) if rng.random() < 0.9 else request


def _names_it(request: Any) -> bool:
    """Whether a request names the live session."""
    return request.get("session_key") == _KEY or (request.get("session_id") == _ID and not request.get("tenant"))
