"""Modelled workers in this process, whose calls come from a coordinator's rounds, without Dynamo."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from ampd.keys import session_key
from ampd.types import WorkerView
from tests.router.replica_lab import Replica
from tests.waiting import until
from tests.workers.rounds_lab import chunks_of
from workers.parts import WorkerParts


class Site:
    """Workers by name, and one coordinator."""

    def __init__(self, replica: Replica, parts: dict[str, WorkerParts]) -> None:
        self._replica = replica
        self._names: set[str] = set()
        self.parts = parts
        replica.workers.prefill = self._prefill
        replica.workers.generate = self._generate
        replica.workers.kv = self._kv

    async def _prefill(self, worker_id: str, request: Any, _context: Any) -> AsyncIterator[dict[str, Any]]:
        return chunks_of(self.parts[worker_id].rounds.prefill, request)

    async def _generate(self, worker_id: str, request: Any, _context: Any) -> AsyncIterator[dict[str, Any]]:
        return chunks_of(self.parts[worker_id].rounds.generate, request)

    async def _kv(self, worker_id: str, request: Any, _timeout_s: float) -> Any:
        return await self.parts[worker_id].rounds.kv(request)

    async def publish(self) -> None:
        """Publish the views of all workers, and wait until the coordinator has them."""
        published = {name: await self._view(name) for name in self.parts}
        for view in published.values():
            await self._replica.store.publish_worker(view, 300.0)

        def are_seen() -> bool:
            seen = {view.worker_id: (view.role, view.held_tokens) for view in self._replica.view.workers()}
            return seen == {name: (view.role, view.held_tokens) for name, view in published.items()}

        await until(are_seen)

    async def round(self, name: str, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
        """Tokens and record of a round of the session `name`."""
        self._names.add(name)
        return await self._replica.round(name, token_ids=prompt)

    async def _view(self, worker_id: str) -> WorkerView:
        """What a worker's publisher would publish."""
        held = {session_key("", name): await self.held(worker_id, name) for name in self._names}
        there = {session: tokens for session, tokens in held.items() if tokens}
        return replace(self.parts[worker_id].read_view(), held_tokens=there)

    async def held(self, worker_id: str, name: str) -> int:
        """Tokens of a session's context whose KV a worker holds."""
        return await self.parts[worker_id].engine.kv.held_tokens(session_key("", name))
