"""Workers that come and go while rounds run: added, drained, killed. The first of each kind stays."""

from __future__ import annotations

import random
import signal
from collections.abc import Collection
from enum import StrEnum

from benchmarks.faults.cluster import PAIR, LiveGraph, Member

_MOST = PAIR + 1
_KINDS = ("prefill", "decode")


class Change(StrEnum):
    """`ADDED`: one more worker. `DRAINED`: SIGTERM, and a new one. `KILLED`: SIGKILL, and a new one."""

    ADDED = "worker added"
    DRAINED = "worker drained"
    KILLED = "worker killed"


async def change(graph: LiveGraph, what: Change, elders: Collection[Member], rng: random.Random) -> None:
    """Change a random role's workers, and wait until all processes agree on them.

    A worker that would be one too many is drained instead of being added.
    """
    kind = rng.choice(_KINDS)
    await graph.replace_ended()  # an event before may have left only the elder
    workers = graph.of(kind)
    if what is Change.ADDED and len(workers) < _MOST:
        await graph.started(kind)
    else:
        leaving = rng.choice([member for member in workers if member not in elders])
        await graph.end(leaving, signal.SIGKILL if what is Change.KILLED else signal.SIGTERM)
        await graph.replace_ended()
    await graph.until_whole()
