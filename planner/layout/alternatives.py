"""Alternatives to the best layout: layouts of other kinds, so that a reader sees what another way of serving costs."""

from __future__ import annotations

from collections.abc import Sequence

from planner.layout.layout import Layout
from planner.layout.neighbours import counts_of


def of_other_kinds(best: Layout, ranked: Sequence[Layout], count: int) -> list[Layout]:
    """Up to `count` layouts. No two of them, with the best one, have the same degrees in the same roles.

    One of them has other roles than the best one, if there is any: it is co-located where the best one is not.

    Args:
        ranked: the most promising first.
    """
    kinds = {frozenset(counts_of(best)): best}
    for layout in ranked:
        kinds.setdefault(frozenset(counts_of(layout)), layout)
    others = [layout for layout in kinds.values() if layout != best]
    chosen = others[:count]
    if chosen and not any(_roles(layout) != _roles(best) for layout in chosen):
        chosen[-1] = next((layout for layout in others if _roles(layout) != _roles(best)), chosen[-1])
    return chosen


def _roles(layout: Layout) -> frozenset[object]:
    return frozenset(layout.groups)
