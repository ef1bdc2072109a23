"""Watches a graph that serves: reports processes that end, starts the frontend again, and fails when nothing serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from ampd.cli.serve.end_reasons import late_error
from ampd.cli.serve.graph import COORDINATOR, FRONTEND
from ampd.cli.serve.processes import Supervisor
from ampd.cli.serve.restarts import Restarts
from ampd.cli.serve.settings import ServeSettings
from ampd.errors import RunError
from ampd.policies.registry import POOLS

_WATCH_S = 0.5


class GraphWatch:
    """Follows the processes of a graph from the moment that it is ready.

    Of the processes only the frontend starts again: it holds nothing, and Dynamo ends it with exit code 0 where it gets
    no inotify instance. Rounds of a worker or coordinator that ended go on at the others.

    Args:
        discovery_dir: folder of Dynamo's file discovery.
        progress: gets a line for each process that ends, and when the frontend starts again.
    """

    def __init__(
        self, settings: ServeSettings, supervisor: Supervisor, discovery_dir: Path, progress: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._discovery_dir = discovery_dir
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._reported: set[str] = set()
        self._restarts = Restarts(self._loop.time())
        self._frontend_due_s: float | None = None

    async def until(self, stopped: asyncio.Event) -> None:
        """Return when the event is set.

        Raises:
            RunError: the graph cannot serve any more.
        """
        while not stopped.is_set():
            self._look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _WATCH_S)

    def _look(self) -> None:
        ended = self._supervisor.ended(late_error)
        new = sorted(ended.keys() - self._reported)
        for name in new:
            self._progress(ended[name] + (self._frontend_ended() if name == FRONTEND else ""))
        self._reported = set(ended)
        starts_again = self._frontend_due_s is not None
        lost = lost_part(self._settings, ended.keys() - {FRONTEND} if starts_again else ended.keys())
        if lost:
            raise RunError(f"ampd serve: no {lost} is left: {ended[new[-1]]}")
        if not self._discovery_dir.exists():
            raise RunError(
                f"ampd serve: the folder {self._discovery_dir} was deleted. In it the processes of the graph find each "
                "other, and they cannot follow a new one; start the graph again, and keep cleaners of temporary files "
                "away from it"
            )
        if self._frontend_due_s is not None and self._loop.time() >= self._frontend_due_s:
            self._frontend_due_s = None
            self._supervisor.start_again(FRONTEND)
            self._reported.discard(FRONTEND)

    def _frontend_ended(self) -> str:
        """Arrange for the frontend's next start; what happens next, in words."""
        now_s = self._loop.time()
        pause_s = self._restarts.pause_s(now_s)
        if pause_s is None:
            return "; it does not start again, because it has ended soon after each start"
        self._frontend_due_s = now_s + pause_s
        return f"; it starts again in {pause_s:g} s"


def lost_part(settings: ServeSettings, ended: Collection[str]) -> str | None:
    """The part of the graph that has no process left, although the graph cannot serve without it."""
    counts = Counter(name.split("-")[0] for name in ended)
    if counts[FRONTEND]:
        return FRONTEND
    if counts[COORDINATOR] == settings.coordinators:
        return COORDINATOR
    is_fixed, workers = POOLS.create_named(settings.pools).is_idle, settings.workers()
    # Where roles change, any worker may come to own sessions.
    needed = {role for role in workers if role.owns_sessions or not is_fixed}
    if sum(counts[role] for role in needed) < sum(workers[role] for role in needed):
        return None
    return f"{' or '.join(role for role in workers if role in needed)} worker" if is_fixed else "worker"
