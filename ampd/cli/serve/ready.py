"""Waits until a local graph can serve: workers have leases, and the frontend knows the model and its coordinators."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

from ampd.errors import RunError
from ampd.state.store import StateStore
from ampd.types import Role
from ampd.wire import COORDINATOR_COMPONENT

_POLL_S = 0.2
_REMIND_S = 30.0
_NO_ANSWER = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading the answer of another server than a frontend raises."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The graph that should become ready; `url`: its frontend."""

    url: str
    model_name: str
    workers: Mapping[Role, int]
    coordinators: int = 1


async def wait_until_ready(
    store: StateStore,
    expected: Expected,
    ended: Callable[[], dict[str, str]],
    timeout_s: float,
    progress: Callable[[str], None],
) -> None:
    """Return when the expected graph can serve.

    Args:
        ended: name -> one line for each process that has ended.
        progress: gets a line about the missing parts when they change, and every 30 s.

    Raises:
        RunError: a process ended, or `timeout_s` passed; the line names the missing parts.
    """
    start_s = reported_s = time.monotonic()
    reported = ""
    async with httpx.AsyncClient(base_url=expected.url, timeout=2.0, trust_env=False) as client:
        while missing := await _missing(store, client, expected):
            for line in ended().values():
                raise RunError(f"ampd serve: {line}")
            now_s = time.monotonic()
            if now_s > start_s + timeout_s:
                raise RunError(f"ampd serve: not ready after {timeout_s:.0f} s; still missing: {missing}")
            if missing != reported or now_s > reported_s + _REMIND_S:
                progress(f"waiting for {missing}" + (f" ({now_s - start_s:.0f} s)" if missing == reported else ""))
                reported, reported_s = missing, now_s
            await asyncio.sleep(_POLL_S)


async def _missing(store: StateStore, client: httpx.AsyncClient, expected: Expected) -> str:
    live = Counter(view.role for view in await store.snapshot())
    parts = []
    if live.total() < sum(expected.workers.values()):
        # With all workers alive, a pools policy may already have changed their roles.
        parts = [
            f"{count - live[role]} {role} worker(s)" for role, count in expected.workers.items() if live[role] < count
        ]
    if not await _lists_model(client, expected.model_name):
        parts.append("the model at the frontend")
    elif (absent := expected.coordinators - await _coordinators(client)) > 0:
        # Coordinators enter discovery when a decode worker is alive.
        parts.append(f"{absent} coordinator(s) at the frontend")
    return ", ".join(parts)


async def _lists_model(client: httpx.AsyncClient, model_name: str) -> bool:
    try:
        reply = await client.get("/v1/models")
        return any(model["id"] == model_name for model in reply.json()["data"])
    except (httpx.HTTPError, *_NO_ANSWER):
        return False


async def _coordinators(client: httpx.AsyncClient) -> int:
    """Number of coordinators that the frontend has discovered (its /health lists the instances)."""
    try:
        instances = (await client.get("/health")).json()["instances"]
        return sum(instance["component"] == COORDINATOR_COMPONENT for instance in instances)
    except (httpx.HTTPError, *_NO_ANSWER):
        return 0
