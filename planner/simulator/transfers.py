"""KV on its way between simulated workers: transfers share the outgoing and the incoming links of their workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.simulator.events import EventLoop
from planner.simulator.outcome import Span
from planner.simulator.worker import SimulatedWorker
from planner.simulator.world import World


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer of KV.

    Attributes:
        left_s: remaining time in seconds if it had its link alone.
        share: its part of its link since `changed_s`.
    """

    source: str
    target: str
    left_s: float
    done: Callable[[], None]
    share: float = 0.0
    changed_s: float = 0.0
    version: int = 0


class Links:
    """One full-duplex link per worker. A transfer gets an equal share of the more crowded of its two ends."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._out: dict[str, list[Transfer]] = {}
        self._in: dict[str, list[Transfer]] = {}

    def start(self, source: str, target: str, seconds: float, done: Callable[[], None]) -> None:
        """Begin a transfer that takes `seconds` alone on its links; `done()` is called at its end."""
        transfer = Transfer(source, target, seconds, done)
        self._out.setdefault(source, []).append(transfer)
        self._in.setdefault(target, []).append(transfer)
        self._share_out(source, target)

    def _share_out(self, source: str, target: str) -> None:
        """Give every transfer at these two ends its new share."""
        for transfer in self._out[source]:
            self._give_share(transfer)
        for transfer in self._in[target]:
            if transfer.source != source:
                self._give_share(transfer)

    def _give_share(self, transfer: Transfer) -> None:
        share = 1.0 / max(len(self._out[transfer.source]), len(self._in[transfer.target]))
        if share == transfer.share:
            return
        now_s = self._loop.now_s
        transfer.left_s = max(transfer.left_s - (now_s - transfer.changed_s) * transfer.share, 0.0)
        transfer.changed_s = now_s
        transfer.share = share
        transfer.version += 1
        self._loop.at(now_s + transfer.left_s / share, self._end, (transfer, transfer.version))

    def _end(self, due: tuple[Transfer, int]) -> None:
        transfer, version = due
        if transfer.version != version:
            return  # its share has changed, and with it its end
        self._out[transfer.source].remove(transfer)
        self._in[transfer.target].remove(transfer)
        self._share_out(transfer.source, transfer.target)
        transfer.done()


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
        started_s = self._loop.now_s
        seconds = self._kv_read_s + self._model.kv_transfer_s(tokens, source.parallelism, target.parallelism)

        def done() -> None:
            if self._spans is not None:
                detail: dict[str, Any] = {"session": session_id, "tokens": tokens, "from": source.worker_id}
                self._spans.append(Span(target.worker_id, "kv-in", kind, started_s, self._loop.now_s, detail))
            arrived()

        self._links.start(source.worker_id, target.worker_id, seconds, done)
