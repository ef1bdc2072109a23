"""What must hold after each run: right tokens or a clear error, one owner per session, nothing left behind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.faults.load import Ending, RoundResult

MUST_BE_ZERO = (
    "rounds",
    "queued",
    "engine requests",
    "protected requests",
    "page leases",
    "writers",
    "session tokens",
    "kept sessions",
    "NIXL reads",
    "rounds at workers",
    "refusals",
    "told rounds",
    "ended sessions",
    "background work",
)
"""Figures of a process that are above 0 only while rounds are in progress or sessions live."""

TOLD_OVER = "RoundEnds._serve"
"""The task of a coordinator for the connection of a worker, which the worker's first round opens."""

SPARE_TASKS = 0
"""Asyncio tasks of the same name that a process may have more than at the start."""


def check_endings(results: Iterable[RoundResult]) -> list[str]:
    """Each round completed with the right tokens, or ended with a clear error, or its client left."""
    return [
        f"{result.session_id}: {result.ending}: {result.detail}"
        for result in results
        if result.ending in (Ending.LOST, Ending.WRONG) or (result.ending is Ending.FAILED and not result.detail)
    ]


def check_owners(results: Sequence[RoundResult], bindings: Mapping[str, str]) -> list[str]:
    """An epoch of a session names one decode worker, epochs never go back, and the shared state names the last owner.

    A final round that fails may have ended its session. The session lives anew when that round is sent again, and its
    epochs begin with 1. A frontend sends it again by itself if its connection broke, which the client does not see.

    Args:
        results: in the order in which the rounds were sent.
        bindings: session id -> decode worker, from the shared state, of sessions that have completed a round since the
            fault was healed.
    """
    violations = []
    lives: Counter[str] = Counter()
    owners: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    epochs: dict[tuple[str, int], int] = {}
    last: dict[str, str] = {}
    for result in results:
        life = (result.session_id, lives[result.session_id])
        lives[result.session_id] += result.is_final
        for record in result.records:
            if not (result.is_final and record["epoch"] == 1):
                owners[*life, record["epoch"]].add(record["decode_worker"])
        if result.ending is Ending.COMPLETED and result.records:
            record = result.records[-1]
            epoch, before = record["epoch"], epochs.get(life, 0)
            if 0 < epoch < before:  # without the shared state a coordinator knows no epoch of another one's session
                violations.append(f"{result.session_id}: epoch {epoch} after epoch {before}")
            epochs[life] = max(epoch, before)
            last[result.session_id] = record["decode_worker"]
    for (session_id, _, epoch), workers in owners.items():
        if len(workers) > 1:
            violations.append(f"{session_id}: epoch {epoch} has the owners {', '.join(sorted(workers))}")
    for session_id, worker_id in bindings.items():
        if session_id in last and last[session_id] != worker_id:
            violations.append(
                f"{session_id}: its last round was on {last[session_id]}, the shared state names {worker_id}"
            )
    return violations


def check_idle(
    figures: Mapping[str, Mapping[str, Any]], tasks_at_start: Mapping[str, Mapping[str, int]], keys: Sequence[str]
) -> list[str]:
    """Nothing outlives its owner, once all sessions have ended.

    Args:
        figures: the debug view of each process.
        tasks_at_start: kind of process -> task name -> number, of an idle process.
        keys: those of the shared state that belong to sessions or to queues.
    """
    violations = [f"the shared state has {key}" for key in keys]
    for name, view in figures.items():
        violations += [f"{name}: {view[figure]} {figure}" for figure in MUST_BE_ZERO if view.get(figure)]
        usual = tasks_at_start[name.rpartition("-")[0]]
        for task, number in view["tasks"].items():
            expected = len(view["workers"]) if task == TOLD_OVER else usual.get(task, 0)
            if number > expected + SPARE_TASKS:
                violations.append(f"{name}: {number} tasks {task!r}, {expected} were expected")
    return violations
