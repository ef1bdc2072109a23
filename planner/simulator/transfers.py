"""KV on its way between two simulated workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.simulator.links import Links, Transfer
from planner.simulator.outcome import Span
from planner.simulator.worker import SimulatedWorker
from planner.simulator.world import World


class KvTransfers:
    """Moves KV over the workers' links, and records it in the timeline."""

    def __init__(self, world: World) -> None:
        self._loop = world.loop
        self._model = world.model
        self._kv_read_s = world.options.kv_read_s
        self._spans = world.spans
        self._links = Links(world.loop)

    def move(
        self,
        kind: str,
        session_id: str,
        source: SimulatedWorker,
        target: SimulatedWorker,
        tokens: int,
        arrived: Callable[[], None],
    ) -> None:
        """Call `arrived` when the tokens are there: at once if there are none. `kind`: as in `Span`."""
        if not tokens:
            arrived()
            return
        seconds = self._kv_read_s + self._model.kv_transfer_s(tokens, source.parallelism, target.parallelism)

        def done(transfer: Transfer) -> None:
            if self._spans is not None:
                detail: dict[str, Any] = {"session": session_id, "tokens": tokens, "from": source.worker_id}
                self._spans.append(Span(target.worker_id, "kv-in", kind, transfer.started_s, self._loop.now_s, detail))
            arrived()

        self._links.start(source.worker_id, target.worker_id, seconds, done)
