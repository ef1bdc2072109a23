"""The layouts next to a layout: one replica more, less, split, merged or in another role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ampd.types import Role
from planner.layout.layout import Layout, replicas_of

Counts = Counter[tuple[Role, int]]
"""(role, degree) -> replicas."""

_RAISED = 1 + 1e-9
"""Less than this factor is rounding."""
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL, Role.MIXED: Role.DECODE}
"""The role that one replica changes to."""
_TOGETHER = ((Role.PREFILL, Role.DECODE), (Role.PREFILL, Role.MIXED), (Role.MIXED, Role.PREFILL))
"""Roles that all replicas of a role change together: to co-located serving, to mixed workers and back."""


def neighbours(layout: Layout, degrees: Sequence[int], most_gpus: int) -> list[Layout]:
    """Every layout that one move makes of this one, within the GPUs, each once.

    A move adds or removes a replica, changes its role, splits it into two of half the degree, merges two equal ones,
    or gives all replicas of one role another role.
    """
    now = counts_of(layout)
    found: dict[Layout, None] = {}
    for counts in _moves(now, degrees):
        moved = layout_of(counts)
        if moved != layout and moved.gpus <= most_gpus and (moved.decode or moved.mixed):
            found[moved] = None
    return list(found)


def scaled(layout: Layout, factor: int) -> Layout:
    """A layout of `factor` times as many replicas."""
    return layout_of(Counter({key: factor * count for key, count in counts_of(layout).items()}))


def filled(layout: Layout, degrees: Sequence[int], most_gpus: int, bound: Callable[[Layout], float]) -> Layout:
    """The layout with further replicas of its roles, as long as there are GPUs for one that raises the bound.

    Args:
        bound: about the rate that a layout carries.
    """
    while True:
        counts = counts_of(layout)
        more = [layout_of(_with(counts, {(role, degree): 1})) for role in layout.groups for degree in degrees]
        able = [each for each in more if each.gpus <= most_gpus and bound(each) > bound(layout) * _RAISED]
        if not able:
            return layout
        layout = max(able, key=bound)


def counts_of(layout: Layout) -> Counts:
    return Counter({(role, degree): count for role, group in layout.groups.items() for degree, count in group})


def layout_of(counts: Counts) -> Layout:
    """The layout of these replicas. A single mixed one has no others to prefill for, so it is co-located."""
    if counts.total() == 1:
        counts = Counter({(Role.DECODE if role is Role.MIXED else role, degree): 1 for role, degree in +counts})
    by_role = {
        role: replicas_of({degree: count for (of, degree), count in counts.items() if of is role}) for role in Role
    }
    return Layout(by_role[Role.PREFILL], by_role[Role.DECODE], by_role[Role.MIXED])


def _moves(now: Counts, degrees: Sequence[int]) -> Iterator[Counts]:
    present = [key for key, count in now.items() if count]
    for role, degree in present:
        yield _with(now, {(role, degree): -1, (_OTHER[role], degree): 1})
    yield from _resized(now, present, degrees)
    for role, other in _TOGETHER:
        yield _all_in(now, role, other)
    for role, degree in present:
        yield _with(now, {(role, degree): -1})
    for role in dict.fromkeys([*(role for role, _ in present), Role.DECODE, Role.PREFILL]):
        for degree in degrees:
            yield _with(now, {(role, degree): 1})


def _resized(now: Counts, present: Sequence[tuple[Role, int]], degrees: Sequence[int]) -> Iterator[Counts]:
    """Splits and merges, within a role and across roles."""
    for role, degree in present:
        half, double = degree // 2, degree * 2
        if half in degrees and half * 2 == degree:
            yield _with(now, {(role, degree): -1, (role, half): 2})
            yield _with(now, {(role, degree): -1, (Role.PREFILL, half): 1, (Role.DECODE, half): 1})
        if double not in degrees:
            continue
        if now[role, degree] >= 2:
            yield _with(now, {(role, degree): -2, (role, double): 1})
        for other in Role:
            if other is not role and now[other, degree]:
                yield _with(now, {(role, degree): -1, (other, degree): -1, (role, double): 1})
        if now[role, degree] == 1:
            # Takes free GPUs.
            yield _with(now, {(role, degree): -1, (role, double): 1})


def _with(now: Counts, change: dict[tuple[Role, int], int]) -> Counts:
    counts = Counter(now)
    for key, difference in change.items():
        counts[key] += difference
    return +counts


def _all_in(now: Counts, role: Role, other: Role) -> Counts:
    counts: Counts = Counter()
    for (of, degree), count in now.items():
        counts[other if of is role else of, degree] += count
    return counts
