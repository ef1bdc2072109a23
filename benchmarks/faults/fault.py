"""A fault: how it strikes, how long it stays, and how it is healed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults.aims import SILENCE_AIM_S
from benchmarks.faults.cluster import LEASE_S, LiveGraph, Member
from benchmarks.faults.load import Client
from benchmarks.faults.moments import Moment, Stage

OUTAGE_S = 3 * LEASE_S
"""How long the shared state stays away or refuses."""


@dataclass
class Scene:
    """What a fault works on.

    Attributes:
        processes: kind -> the process that the victim's round uses.
        running: work of the fault that goes on until `heal` waits for it.
        kept: what `strike` must keep for `heal`.
        complaints: violations that the fault itself has noticed.
        spared: processes that a fault must not end.
    """

    graph: LiveGraph
    client: Client
    stage: Stage
    moment: Moment
    processes: dict[str, Member] = field(default_factory=dict)
    running: list[asyncio.Task[None]] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    spared: Collection[Member] = ()

    @property
    def worker(self) -> Member:
        """The worker that has the victim's round at the moment; in the tool gap its decode worker."""
        return self.processes[self._role]

    @property
    def worker_to_end(self) -> Member:
        """The same, or another of its role if it is spared."""
        return self.to_end(self._role)

    def to_end(self, kind: str) -> Member:
        """The process of the round, or another of its kind if it is spared."""
        own = self.processes[kind]
        return next((member for member in (own, *self.graph.of(kind)) if member not in self.spared), own)

    @property
    def _role(self) -> str:
        is_at_decode = self.moment in (Moment.READING_INCREMENT, Moment.DECODING, Moment.TOOL_GAP)
        return "decode" if is_at_decode else "prefill"


Action = Callable[[Scene], Awaitable[None]]


Check = Callable[[Scene], Awaitable[bool]]


async def nothing(_scene: Scene) -> None:
    """No action."""


async def at_once(_scene: Scene) -> bool:
    """A fault that has struck when its action has ended."""
    return True


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Attributes:
        group: heading under which it is reported.
        what: what happens, for readers of the report.
        prepare: before the victim's first round. enter: between it and the round that is struck.
        holds_s: between `strike` and `heal`; longer if it has not struck by then.
        heal: ends the fault. Processes that have ended are replaced afterwards.
        has_struck: whether it has hit something since `strike`. A run in which it never does proves nothing.
        never_at: moments after which there is nothing that it could hit. The matrix has no such cells.
        check: adds to the complaints when all sessions have ended.
        lasts: it goes on until it is healed, so that new rounds may wait at any time meanwhile.
        aim_s: the longest time to recover that is aimed at. The matrix marks the cells that took longer.
    """

    name: str
    group: str
    what: str
    strike: Action = nothing
    heal: Action = nothing
    prepare: Action = nothing
    enter: Action = nothing
    check: Action = nothing
    has_struck: Check = at_once
    never_at: Collection[Moment] = ()
    holds_s: float = 1.0
    lasts: bool = False
    aim_s: float = SILENCE_AIM_S
