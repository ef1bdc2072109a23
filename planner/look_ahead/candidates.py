"""The sets of roles that a look ahead tries: the present roles, and those that a few changes make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import queued_s
from ampd.types import Parallelism, Role, WorkerView

Roles = Mapping[str, Role]
"""Worker id -> its role."""
Shape = frozenset[tuple[tuple[Parallelism, Role], int]]
"""What makes two sets of roles equal."""


def candidate_roles(workers: Sequence[WorkerView], model: PerformanceModel) -> Iterator[Roles]:
    """The present roles; one worker (of each parallelism), or a quarter of them, changed either way; all decoding.

    If all decode, that is co-located serving. Of the decode and mixed workers, those with the least KV of sessions
    change first. Of the prefill workers, those with the shortest queue change first. Sets that differ only in workers
    of equal parallelism count as one.
    """
    now = {view.worker_id: view.role for view in workers}
    owners = sorted((view for view in workers if view.role.owns_sessions), key=_held_tokens)
    prefill = sorted(
        (view for view in workers if view.role is Role.PREFILL),
        key=lambda view: (queued_s(view, model), view.worker_id),
    )
    quarter = max(len(workers) // 4, 2)
    tried: list[Roles] = [now]
    tried += [now | _all([view], Role.PREFILL) for view in _first_of_each(owners)]
    tried += [now | _all([view], Role.DECODE) for view in _first_of_each(prefill)]
    tried += [now | _all(owners[:quarter], Role.PREFILL), now | _all(prefill[:quarter], Role.DECODE)]
    tried.append(_all(workers, Role.DECODE))
    seen: set[Shape] = set()
    for roles in tried:
        if (found := shape(workers, roles)) not in seen and any(role.owns_sessions for role in roles.values()):
            seen.add(found)
            yield roles


def shape(workers: Sequence[WorkerView], roles: Roles) -> Shape:
    """How many workers of each parallelism have each role."""
    return frozenset(Counter((view.parallelism, roles[view.worker_id]) for view in workers).items())


def in_words(roles: Roles) -> str:
    """As `2 prefill, 6 decode`."""
    count = Counter(roles.values())
    return ", ".join(f"{count[role]} {role.value}" for role in Role if count[role])


def _first_of_each(views: Sequence[WorkerView]) -> list[WorkerView]:
    """The first one of each parallelism."""
    return list({view.parallelism: view for view in reversed(views)}.values())


def _all(workers: Sequence[WorkerView], role: Role) -> dict[str, Role]:
    return {view.worker_id: role for view in workers}


def _held_tokens(view: WorkerView) -> tuple[int, str]:
    return sum(view.held_tokens.values()), view.worker_id
