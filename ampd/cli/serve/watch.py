"""Watches a graph that serves: reports processes that end, ends those that hang, starts the frontend again, and fails
when nothing serves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import httpx

from ampd.cli.serve.graph import COORDINATOR, FRONTEND
from ampd.cli.serve.processes import Supervisor, late_error
from ampd.cli.serve.settings import ServeSettings
from ampd.errors import RunError
from ampd.policies.registry import POOLS
from ampd.supervised_task import SupervisedTask

# -- Ends processes of a local graph that hang, as the liveness probes of the manifests do.
#
# A process that was stopped keeps its connections open, so that neither the frontend nor the other coordinators notice.
# Once it has ended, its rounds go on at another one, or the graph ends with an error.

PERIOD_S, TIMEOUT_S, FAILURES = 5.0, 4.0, 6
"""The probe of a pod, see `livenessProbe` in k8s/base/graph.yaml."""


class LivenessProbe:
    """Asks the processes of a graph whether they live.

    Failures are counted, and not the time, because this process may have been stopped together with the others.

    Args:
        urls: name of a process -> its `/live`. An answer of any status is a sign of life.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        period_s: float = PERIOD_S,
        timeout_s: float = TIMEOUT_S,
        failures: int = FAILURES,
    ) -> None:
        self._urls = dict(urls)
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._most_failures = failures
        self._failures: Counter[str] = Counter()

    def task(self, supervisor: Supervisor, progress: Callable[[str], None]) -> SupervisedTask:
        """`end_hanging` as a task that goes on after an error, because nothing else would notice its end."""
        return SupervisedTask("liveness probe", lambda: self.end_hanging(supervisor, progress))

    async def end_hanging(self, supervisor: Supervisor, progress: Callable[[str], None]) -> None:
        """End each process that has not answered for the last `failures` times. Runs until it is cancelled.

        Args:
            progress: gets a line per process.
        """
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        while True:
            await asyncio.sleep(asked_s + self._period_s - loop.time())
            asked_s = loop.time()
            ended = supervisor.ended()
            urls = {name: url for name, url in self._urls.items() if name not in ended}
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False) as client:
                await asyncio.gather(*(self._ask(client, name, url) for name, url in urls.items()))
            for name, url in urls.items():
                if self._failures[name] >= self._most_failures:
                    del self._failures[name]  # its successor starts anew
                    progress(f"{name} hangs: no answer at {url} {self._most_failures} times; it is ended")
                    supervisor.kill(name)

    async def _ask(self, client: httpx.AsyncClient, name: str, url: str) -> None:
        try:
            await client.get(url)
        except (httpx.HTTPError, OSError):
            self._failures[name] += 1
        else:
            del self._failures[name]


# -- watches a graph that serves: reports processes that end, starts the frontend again, and fails when nothing serves

_WATCH_S = 0.5
_PAUSE_S = 1.0
"""Before the frontend starts again."""
MOST_ENDS, _ENDS_WITHIN_S = 5, 300.0
"""A frontend that ends more often within this time is given up."""


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
        self._frontend_ends_s: list[float] = []
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
        self._frontend_ends_s = [*(end_s for end_s in self._frontend_ends_s if end_s > now_s - _ENDS_WITHIN_S), now_s]
        if len(self._frontend_ends_s) > MOST_ENDS:
            return (
                f"; it does not start again, because it has ended {len(self._frontend_ends_s)} times soon after a start"
            )
        self._frontend_due_s = now_s + _PAUSE_S
        return f"; it starts again in {_PAUSE_S:g} s"


def lost_part(settings: ServeSettings, ended: Collection[str]) -> str | None:
    """The part of the graph that has no process left, although the graph cannot serve without it."""
    counts = Counter(name.split("-")[0] for name in ended)
    if counts[FRONTEND]:
        return FRONTEND
    if counts[COORDINATOR] == settings.coordinators:
        return COORDINATOR
    is_fixed, workers = POOLS.create_named(settings.pools).is_idle, settings.start()
    # Where roles change, any worker may come to own sessions.
    needed = {role for role in workers if role.owns_sessions or not is_fixed}
    if sum(counts[role] for role in needed) < sum(workers[role] for role in needed):
        return None
    return f"{' or '.join(role for role in workers if role in needed)} worker" if is_fixed else "worker"
