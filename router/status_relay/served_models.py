"""404s of a graph that is on its way: Dynamo's frontend has no path of the API before it has found a model's card.

It has none after a card was lost either. Client libraries send a request again after 503, and not after 404.
"""

from __future__ import annotations

import json
from contextlib import suppress
from http import HTTPStatus

import aiohttp

from ampd.wire import with_retry_after
from router.status_relay.api import MODELS, SERVING_PATHS, Refused, error_message

_RETRY_AFTER_S = 1.0


def may_be_on_its_way(method: str, path: str, status: int) -> bool:
    """Whether a 404 may come from a model that is not there yet, or not any more."""
    return method == "POST" and path in SERVING_PATHS and status == HTTPStatus.NOT_FOUND


class ServedModels:
    """The models and the paths that this relay has seen.

    Args:
        session: to ask the frontend with.
        upstream: the frontend's URL.
    """

    def __init__(self, session: aiohttp.ClientSession, upstream: str) -> None:
        self._session = session
        self._upstream = upstream
        self._paths: set[str] = set()
        self._models: set[str] = set()

    def answered(self, path: str) -> None:
        """The frontend has this path."""
        if path in SERVING_PATHS:
            self._paths.add(path)

    async def on_its_way(self, path: str, body: bytes) -> Refused | None:
        """What to say instead of a 404; None: the model is unknown, or the graph does not have the path.

        Args:
            body: of the 404.
        """
        listed = await self._listed()
        if not listed:
            return _refused("no model is served at the moment")
        self._models |= listed
        if body:
            words = set((error_message(body) or "").replace("'", " ").replace("`", " ").split())
            gone = words & (self._models - listed)
            return _refused(f"the model {gone.pop()} is not served at the moment") if gone else None
        if path in self._paths or await self._has_path(path):
            return _refused("the model is not served at the moment")
        return None

    async def _listed(self) -> set[str]:
        with suppress(aiohttp.ClientError, ValueError, RecursionError):
            async with self._session.get(self._upstream + MODELS) as answer:
                match json.loads(await answer.read()):
                    case {"data": list(models)}:
                        return {str(each.get("id")) for each in models if isinstance(each, dict)}
        return set()

    async def _has_path(self, path: str) -> bool:
        """Whether the frontend has the path by now. It refuses a request without a body."""
        with suppress(aiohttp.ClientError):
            async with self._session.post(self._upstream + path) as answer:
                return answer.status != HTTPStatus.NOT_FOUND
        return True


def _refused(message: str) -> Refused:
    return Refused(HTTPStatus.SERVICE_UNAVAILABLE, with_retry_after(message, _RETRY_AFTER_S))
