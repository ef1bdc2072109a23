"""KV transfers: they share the outgoing link of their source and the incoming link of their target."""

from __future__ import annotations

from collections.abc import Callable

from planner.simulator.events import EventLoop


class Transfer:
    """One transfer of KV.

    Attributes:
        left_s: remaining time in seconds if it had its link alone.
        share: its present part of its link.
    """

    __slots__ = ("changed_s", "done", "left_s", "share", "source", "started_s", "target", "version")

    def __init__(
        self, source: str, target: str, seconds: float, now_s: float, done: Callable[[Transfer], None]
    ) -> None:
        self.source = source
        self.target = target
        self.left_s = seconds
        self.started_s = now_s
        self.changed_s = now_s
        self.share = 0.0
        self.version = 0
        self.done = done


class Links:
    """One full-duplex link per worker. A transfer gets an equal share of the more crowded of its two ends."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._out: dict[str, list[Transfer]] = {}
        self._in: dict[str, list[Transfer]] = {}

    def start(self, source: str, target: str, seconds: float, done: Callable[[Transfer], None]) -> None:
        """Begin a transfer that takes `seconds` alone on its links; `done(transfer)` is called at its end."""
        transfer = Transfer(source, target, seconds, self._loop.now_s, done)
        _join(self._out, source, transfer)
        _join(self._in, target, transfer)
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
        transfer.done(transfer)


def _join(links: dict[str, list[Transfer]], worker_id: str, transfer: Transfer) -> None:
    if worker_id in links:
        links[worker_id].append(transfer)
    else:
        links[worker_id] = [transfer]
