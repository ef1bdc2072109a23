"""Publishes a coordinator's view of itself once a second, for `ampd top` and as the heartbeat of the shared state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ampd.background_tasks import SupervisedTask
from ampd.state.known_worker import heartbeat_s
from ampd.state.redis_store import StateStore
from ampd.state.store import StateUnavailableError
from ampd.types import CoordinatorView
from router.coordinator import Coordinator
from router.round_window import RoundWindow
from router.settings import CoordinatorSettings

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_MOST_BREAKING = 8


class CoordinatorViewReader:
    """Reads the state of a coordinator.

    Args:
        coordinator_id: its Dynamo instance id, in hexadecimal.
        window: observes its rounds.
        context_tokens: with which it has registered the model now.
    """

    def __init__(
        self,
        coordinator_id: str,
        coordinator: Coordinator,
        settings: CoordinatorSettings,
        window: RoundWindow,
        context_tokens: Callable[[], int],
    ) -> None:
        self._coordinator_id = coordinator_id
        self._coordinator = coordinator
        self._settings = settings
        self._window = window
        self._context_tokens = context_tokens

    def __call__(self) -> CoordinatorView:
        """The coordinator now."""
        coordinator, settings = self._coordinator, self._settings
        pools, breaking = coordinator.pools, coordinator.branches.breaking()
        return CoordinatorView(
            self._coordinator_id,
            settings.slo,
            routing=settings.routing,
            binding=settings.binding,
            pools=settings.pools,
            rounds_in_progress=coordinator.running,
            is_leading=pools is not None and pools.is_leading,
            is_state_heard=coordinator.view.connected,
            state_losses=coordinator.view.counters.losses,
            context_tokens=self._context_tokens(),
            window=self._window.read(),
            breaking=tuple(breaking[:_MOST_BREAKING]),
            breaking_sessions=len(breaking),
        )


class CoordinatorViewPublisher:
    """Publishes a coordinator's view in the background. Rounds never wait for it, and a lost state ends nothing.

    Args:
        read_view: the coordinator now.
        lease_s: seconds after its last publication until the coordinator is considered gone.
        on_answer: called after each publication that the state has taken.
    """

    def __init__(
        self,
        store: StateStore,
        coordinator_id: str,
        read_view: Callable[[], CoordinatorView],
        lease_s: float,
        interval_s: float = _INTERVAL_S,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._coordinator_id = coordinator_id
        self._read_view = read_view
        self._lease_s = lease_s
        self._interval_s = min(interval_s, heartbeat_s(lease_s))
        self._on_answer = on_answer
        self._task = SupervisedTask("coordinator-publisher", self._run)

    def start(self) -> None:
        """Begin to publish."""
        self._task.start()

    async def stop(self) -> None:
        """Stop, and take back what was published (if the state does not answer, the lease ends it)."""
        if not self._task.is_running:
            return
        await self._task.stop()
        try:
            await self._store.remove_coordinator(self._coordinator_id)
        except StateUnavailableError as error:
            log.debug("this coordinator's view stays published for %g s: %s", self._lease_s, error)

    async def publish(self) -> None:
        """Publish now, because somebody waits for what has changed."""
        try:
            await self._store.publish_coordinator(self._read_view(), self._lease_s)
        except StateUnavailableError as error:
            log.debug("this coordinator's view was not published: %s", error)  # the cluster view logs the loss
        else:
            self._on_answer()

    async def _run(self) -> None:
        while True:
            await self.publish()
            await asyncio.sleep(self._interval_s)
