"""Waiting until a local graph can serve: workers have their leases, the frontend the model and its coordinators."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import httpx

from ampd.errors import RunError
from ampd.state.store import StateStore
from ampd.types import Role
from ampd.wire import COORDINATOR_COMPONENT

_POLL_S = 0.2
_REMIND_S = 30.0


async def wait_until_ready(
    store: StateStore,
    url: str,
    model_name: str,
    expected: dict[Role, int],
    ended: Callable[[], dict[str, str]],
    timeout_s: float,
    progress: Callable[[str], None],
    coordinators: int = 1,
) -> None:
    """Return when `expected` workers hold leases and the frontend at `url` has `model_name` and its `coordinators`.

    Raises:
        RunError: a process died, or `timeout_s` passed; the line says what was still missing.
    """
    begin_s = said_s = time.monotonic()
    said = ""
    async with httpx.AsyncClient(base_url=url, timeout=2.0) as client:
        while missing := await _missing(store, client, model_name, expected, coordinators):
            for line in ended().values():
                raise RunError(f"ampd serve: {line}")
            now_s = time.monotonic()
            if now_s > begin_s + timeout_s:
                raise RunError(f"ampd serve: not ready after {timeout_s:.0f} s; still missing: {missing}")
            if missing != said or now_s > said_s + _REMIND_S:
                progress(f"waiting for {missing}" + (f" ({now_s - begin_s:.0f} s)" if missing == said else ""))
                said, said_s = missing, now_s
            await asyncio.sleep(_POLL_S)


async def _missing(
    store: StateStore, client: httpx.AsyncClient, model_name: str, expected: dict[Role, int], coordinators: int
) -> str:
    live = Counter(view.role for view in await store.snapshot())
    parts = []
    if live.total() < sum(expected.values()):
        # All of them may be there and have other roles by now.
        parts = [f"{count - live[role]} {role} worker(s)" for role, count in expected.items() if live[role] < count]
    if not await _lists_model(client, model_name):
        parts.append("the model at the frontend")
    elif (absent := coordinators - await _coordinators(client)) > 0:
        # They enter discovery when they see a decode worker.
        parts.append(f"{absent} coordinator(s) at the frontend")
    return ", ".join(parts)


async def _lists_model(client: httpx.AsyncClient, model_name: str) -> bool:
    try:
        reply = await client.get("/v1/models")
        return any(model["id"] == model_name for model in reply.json()["data"])
    except (httpx.HTTPError, ValueError, KeyError):
        return False


async def _coordinators(client: httpx.AsyncClient) -> int:
    """How many the frontend knows of (its /health lists the instances that it has discovered)."""
    try:
        instances = (await client.get("/health")).json()["instances"]
        return sum(one["component"] == COORDINATOR_COMPONENT for one in instances)
    except (httpx.HTTPError, ValueError, KeyError):
        return 0
