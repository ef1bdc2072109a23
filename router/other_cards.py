"""Waits for the other coordinators, because frontends keep the first of several different cards of a model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ampd.state.redis_store import StateStore
from ampd.state.store import StateUnavailableError

log = logging.getLogger(__name__)


class OtherCards:
    """The cards with which the other coordinators have registered the model.

    A frontend refuses a card that differs from the one that it has, and keeps to that while any coordinator has the
    old one. So coordinators that learn of another context all take their cards away before the first one registers.

    Args:
        coordinator_id: of this coordinator.
        publish: writes this coordinator's view, with the context of its card, to the shared state.
        timeout_s: longest wait for the others, of which one may hang.
    """

    def __init__(
        self,
        store: StateStore,
        coordinator_id: str,
        publish: Callable[[], Awaitable[None]],
        timeout_s: float = 30.0,
        poll_s: float = 0.1,
    ) -> None:
        self._store = store
        self._coordinator_id = coordinator_id
        self._publish = publish
        self._timeout_s = timeout_s
        self._poll_s = poll_s

    async def tell(self) -> None:
        """Tell the others of our card before the frontends see it, so that none of them registers another meanwhile."""
        await self._publish()

    async def until_none_differs(self, context_tokens: int) -> None:
        """Wait until each other coordinator has registered the model with this context, or not at all."""
        different: list[str] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                while different := await self._different(context_tokens):  # noqa: ASYNC110
                    await asyncio.sleep(self._poll_s)
        except TimeoutError:
            log.warning(
                "coordinators %s have still registered the model with another context: frontends may keep it until "
                "they end",
                ", ".join(different),
            )
        except StateUnavailableError as error:
            log.warning("the cards of other coordinators are not known: %s", error)

    async def _different(self, context_tokens: int) -> list[str]:
        views = [heard.view for heard in (await self._store.overview()).coordinators]
        return [
            view.coordinator_id
            for view in views
            if view.coordinator_id != self._coordinator_id and view.context_tokens not in (0, context_tokens)
        ]
