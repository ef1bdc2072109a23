"""What a coordinator says of itself, once a second, to those who look on (`ampd top`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ampd.state.store import StateStore, StateUnavailableError
from ampd.telemetry.coordinator_view import CoordinatorView
from router.coordinator import Coordinator
from router.round_window import RoundWindow
from router.settings import CoordinatorSettings

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0


class Standing:
    """Reads how a coordinator does.

    Args:
        coordinator_id: its Dynamo instance id, in hexadecimal.
        window: observes its rounds.
    """

    def __init__(
        self, coordinator_id: str, coordinator: Coordinator, settings: CoordinatorSettings, window: RoundWindow
    ) -> None:
        self._id = coordinator_id
        self._coordinator = coordinator
        self._settings = settings
        self._window = window
        self._bound = self._repinned = 0

    def __call__(self) -> CoordinatorView:
        """The coordinator now."""
        coordinator, settings = self._coordinator, self._settings
        self._count_sessions()
        pools = coordinator.pools
        return CoordinatorView(
            self._id,
            settings.slo,
            routing=settings.routing,
            binding=settings.binding,
            pools=settings.pools,
            rounds_in_progress=coordinator.running,
            is_leading=pools is not None and pools.is_leading,
            is_state_heard=coordinator.view.connected,
            state_losses=coordinator.view.counters.losses,
            window=self._window.read(),
        )

    def _count_sessions(self) -> None:
        placements = self._coordinator.placements
        self._window.add_sessions(placements.bound - self._bound, placements.repinned - self._repinned)
        self._bound, self._repinned = placements.bound, placements.repinned


class StandingPublisher:
    """Publishes how a coordinator does, in the background: rounds never wait for it, and losing the state ends nothing.

    Args:
        read_view: the coordinator now.
        lease_s: it counts as gone so long after its last word.
    """

    def __init__(
        self,
        store: StateStore,
        read_view: Callable[[], CoordinatorView],
        lease_s: float,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._store = store
        self._read_view = read_view
        self._lease_s = lease_s
        self._interval_s = min(interval_s, lease_s / 3)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to publish."""
        self._task = asyncio.create_task(self._run(), name="standing")

    async def stop(self) -> None:
        """Stop, and take back what was published (if the state does not answer, the lease ends it)."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        try:
            await self._store.remove_coordinator(self._read_view().coordinator_id)
        except StateUnavailableError as error:
            log.debug("what this coordinator said of itself stays for %g s: %s", self._lease_s, error)

    async def _run(self) -> None:
        while True:
            try:
                await self._store.publish_coordinator(self._read_view(), self._lease_s)
            except StateUnavailableError as error:
                log.debug("not published how this coordinator does: %s", error)  # the view has told of the loss
            except Exception:
                log.exception("publishing how this coordinator does failed; trying again")
            await asyncio.sleep(self._interval_s)
