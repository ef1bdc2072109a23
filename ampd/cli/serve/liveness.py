"""Ends processes of a local graph that hang, as the liveness probes of the manifests do.

A process that was stopped keeps its connections open, so that neither the frontend nor the other coordinators notice.
Once it has ended, its rounds go on at another one, or the graph ends with an error.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

import httpx

from ampd.cli.serve.processes import Supervisor
from ampd.supervised_task import SupervisedTask

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
