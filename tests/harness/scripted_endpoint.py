"""Dynamo's endpoint without Dynamo: entering and leaving discovery can fail as often as a test wants."""

from __future__ import annotations

import asyncio
from typing import Any


class ScriptedEndpoint:
    """An endpoint and its own client.

    Attributes:
        failures: how many of the next changes raise.
        is_failure_late: a change that raises has its effect first.
        calls: "enter" or "leave" for each change that was asked for.
        handler: of the requests, once the endpoint is served.
    """

    def __init__(self) -> None:
        self.is_registered = True
        self.failures = 0
        self.is_failure_late = False
        self.calls: list[str] = []
        self.handler: Any = None

    async def client(self) -> ScriptedEndpoint:
        return self

    def connection_id(self) -> int:
        return 1

    def instance_ids(self) -> list[int]:
        return [1] if self.is_registered else []

    async def register_endpoint_instance(self) -> None:
        self._change("enter", is_registered=True)

    async def unregister_endpoint_instance(self) -> None:
        if not self.is_registered:
            raise RuntimeError("not registered")
        self._change("leave", is_registered=False)

    def _change(self, name: str, *, is_registered: bool) -> None:
        self.calls.append(name)
        fails = self.failures > 0
        self.failures -= fails
        if not fails or self.is_failure_late:
            self.is_registered = is_registered
        if fails:
            raise RuntimeError("discovery does not answer")


class SlowEndpoint(ScriptedEndpoint):
    """Writes its entry only when it is told to. Like Dynamo, it does so even if nobody waits for it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = asyncio.Event()

    async def register_endpoint_instance(self) -> None:
        await asyncio.shield(self._write())

    def _write(self) -> asyncio.Task[None]:
        async def write() -> None:
            await self.may_write.wait()
            await super(SlowEndpoint, self).register_endpoint_instance()

        return asyncio.create_task(write())
