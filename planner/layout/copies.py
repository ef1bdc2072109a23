"""Layouts in proportion to a part of a cluster: as many copies of the part as a rate needs, each kind rounded up."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil, floor

from planner.layout.layout import Layout
from planner.layout.neighbours import counts_of, layout_of


def in_proportion(part: Layout, copies: Fraction) -> Layout:
    """So many times as many replicas of each kind, rounded up."""
    return layout_of(Counter({kind: ceil(copies * count) for kind, count in counts_of(part).items()}))


def copies_between(part: Layout, least: float, most: int) -> list[Fraction]:
    """The numbers of copies that give different layouts, ascending, from the first one that is at least `least`.

    Each is the most of its layout: one kind of replica is not rounded.
    """
    if least >= most:
        return [Fraction(most)]
    steps = {
        Fraction(replicas, count)
        for count in counts_of(part).values()
        for replicas in range(max(floor(least * count), 1), most * count + 1)
    }
    able = [step for step in sorted(steps) if least <= step <= most]
    # Another number of copies may give the same layout. The largest of them counts.
    return sorted({in_proportion(part, step): step for step in able}.values())


def fewest_copies(part: Layout, least: float) -> Fraction:
    """The first number of copies that is at least `least`."""
    return copies_between(part, least, ceil(least))[0]
