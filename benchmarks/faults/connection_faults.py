"""Faults of the network between two kinds of processes that all live: connections are reset, or silently forgotten.

Both strike all connections that exist at the moment. New ones work.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress

from benchmarks.faults.aims import DEATH_AIM_S
from benchmarks.faults.fault import Action, Fault, Scene
from tests.harness.connections import drop_packets, reset, strike_between

_GROUP = "Connections"
_PAIRS = (
    ("frontend", "coordinator"),
    ("frontend", "decode"),
    ("coordinator", "decode"),
    ("coordinator", "prefill"),
    ("decode", "prefill"),
    ("coordinator", "redis"),
    ("decode", "redis"),
    ("prefill", "redis"),
)
SILENCE_AIM_S = 16.0
"""A stream whose packets are lost is given up after 15 s. Everything else takes less."""


def _strikes(kinds: tuple[str, str], strike: Callable[[socket.socket], bool]) -> Action:
    async def act(scene: Scene) -> None:
        left, right = (_pids(scene, kind) for kind in kinds)
        scene.kept["ends"] = strike_between(left, right, strike)

    return act


def _pids(scene: Scene, kind: str) -> list[int]:
    """Of all processes of a kind, those included that they have started. The proxy before Redis is in this process."""
    pids = [os.getpid()] if kind == "redis" else []
    for member in scene.graph.of(kind):
        with suppress(OSError):  # it has just ended
            pids += [member.process.pid, *member.children()]
    return pids


async def _has_struck(scene: Scene) -> bool:
    return bool(scene.kept["ends"])


CONNECTION_FAULTS = [
    fault
    for kinds in _PAIRS
    for fault in (
        Fault(
            f"reset-{kinds[0]}-{kinds[1]}",
            _GROUP,
            f"all connections between {kinds[0]}s and {kinds[1]} processes are reset",
            _strikes(kinds, reset),
            has_struck=_has_struck,
            aim_s=DEATH_AIM_S,
        ),
        Fault(
            f"drop-{kinds[0]}-{kinds[1]}",
            _GROUP,
            f"all packets of the connections between {kinds[0]}s and {kinds[1]} processes are lost from now on",
            _strikes(kinds, drop_packets),
            has_struck=_has_struck,
            aim_s=SILENCE_AIM_S,
            lasts=True,
        ),
    )
]
