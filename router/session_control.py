"""Lists, shows and ends sessions for the operator, at the coordinator's system port and without a round."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from ampd.call_signatures import operator_token
from ampd.keys import is_session_key, session_key
from ampd.state.store import Binding, StateUnavailableError
from ampd.wire import SESSIONS_ROUTE
from router.round_run import Services

MOST_LISTED = 1000


class SessionControl:
    """The sessions of a graph as one coordinator sees them: what workers publish, and what it served itself.

    A request names a session by the client's id and its tenant (`session_id`, `tenant`), or by its name inside of the
    graph (`session_key`). A `session_id` that no client uses now may be such a name too. Many clients' ids look like
    one (32 hexadecimal digits). An answer with the key `error` says why a request was not served.

    Args:
        keys: the secrets of the graph. A request brings the token of one of them (`token`).
    """

    def __init__(self, services: Services, keys: tuple[bytes, ...] = ()) -> None:
        self._services = services
        self._tokens = [operator_token(key) for key in keys]
        self._view = services.access.view
        self._store = services.access.store

    def register(self, runtime: Any) -> None:
        """Offer the operations at the system port of the process, unless the graph has no secret."""
        for name, operation in (("list", self.list), ("show", self.show), ("end", self.end)):
            if self._tokens:
                runtime.register_engine_route(f"{SESSIONS_ROUTE}/{name}", partial(self._run, operation))

    async def _run(
        self, operation: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]], request: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Raises `PermissionError` without the token: Dynamo answers 500."""
        given = str(request.get("token")).encode()
        if not any(hmac.compare_digest(given, token.encode()) for token in self._tokens):
            raise PermissionError("the request has no token of this graph's secret, see `ampd session --help`")
        return await operation(request)

    async def list(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The sessions whose KV a worker holds, largest first, at most `limit` (1000)."""
        limit = request.get("limit", MOST_LISTED)
        if type(limit) is not int or limit < 0:
            return {"error": "limit must be a whole number of at least 0"}
        sessions = self._held()
        largest = sorted(sessions, key=lambda key: (-max(sessions[key].values()), key))[:limit]
        return {"total": len(sessions), "sessions": [self._described(key, sessions[key]) for key in largest]}

    async def show(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One session, with its binding."""
        try:
            key, _, binding = await self._named(request)
        except (ValueError, StateUnavailableError) as error:
            return {"error": str(error)}
        held = self._held().get(key, {})
        if not self._is_known(key, binding):
            name = request.get("session_id") or key
            return {"error": f"no session {name} is known: it has ended, or it belongs to a tenant that must be named"}
        bound = {"worker_id": binding.worker_id, "epoch": binding.epoch} if binding else None
        return {**self._described(key, held), "binding": bound}

    async def end(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """End a session and its branches everywhere. A round in progress goes on, and keeps its KV until it ends.

        `released_tokens` in the answer is the KV that workers held. A worker that does not answer releases its part
        later.
        """
        try:
            key, tenant, binding = await self._named(request)
        except (ValueError, StateUnavailableError) as error:
            return {"error": str(error)}
        held = self._held()
        released = sum(sum(held.get(each, {}).values()) for each in self._services.branches.of(key))
        await self._services.end_session(key, tenant, set())
        return {"session_key": key, "was_bound": binding is not None, "released_tokens": released}

    async def _named(self, request: Mapping[str, Any]) -> tuple[str, str, Binding | None]:
        """The session's name inside of the graph, its tenant ("" if that is not known here), and its binding."""
        key, client_id, tenant = (request.get(name) for name in ("session_key", "session_id", "tenant"))
        if not all(isinstance(part, str | None) for part in (key, client_id, tenant)) or bool(key) == bool(client_id):
            raise ValueError("name the session by session_id (and tenant), or by session_key; all are text")
        if key and not is_session_key(key):
            raise ValueError("session_key must be a name of 32 hexadecimal digits")
        if client_id:
            hashed = session_key(tenant or "", client_id)
            binding = await self._store.binding(hashed)
            if self._is_known(hashed, binding) or not is_session_key(client_id):
                return hashed, tenant or "", binding
            own = await self._store.binding(client_id)
            if not self._is_known(client_id, own):
                return hashed, tenant or "", binding
            key, binding = client_id, own
        else:
            binding = await self._store.binding(str(key))
        owner = self._services.sessions.find(str(key)).owner
        return str(key), tenant or (owner.tenant if owner else ""), binding

    def _is_known(self, key: str, binding: Binding | None) -> bool:
        """Whether the session is alive: it is bound, a worker holds its KV, or this replica has served it."""
        keys, held, find = self._services.branches.of(key), self._held(), self._services.sessions.find
        return binding is not None or any(each in held or find(each).owner is not None for each in keys)

    def _held(self) -> dict[str, dict[str, int]]:
        """Session -> worker -> tokens whose KV the worker holds."""
        sessions: dict[str, dict[str, int]] = {}
        for view in self._view.workers():
            for key, tokens in view.held_tokens.items():
                sessions.setdefault(key, {})[view.worker_id] = tokens
        return sessions

    def _described(self, key: str, held: Mapping[str, int]) -> dict[str, Any]:
        """A session; None for what only the replica that served its last round knows."""
        owner = self._services.sessions.find(key).owner
        return {
            "session_key": key,
            "session_id": owner.client_id if owner else None,
            "tenant": owner.tenant if owner else None,
            "idle_s": round(self._services.clock() - owner.served_s, 3) if owner else None,
            "held_tokens": dict(held),
        }
