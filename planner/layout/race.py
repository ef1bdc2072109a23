"""Which of several good layouts carries most: those that trials cannot tell apart get further seeds and finer rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from planner.layout.appraisal import Appraiser
from planner.layout.layout import Layout

_STAGES = ((6, 1.025), (12, 1.0125))
"""Seeds and precision of the goodput, in the order in which layouts get them."""


class Race(NamedTuple):
    """How a race ended.

    Attributes:
        layouts: those that carry most first.
        tied: the layouts that are not shown to carry less than the first one.
        is_whole: no further seeds were left out because the time was over.
    """

    layouts: list[Layout]
    tied: list[Layout]
    is_whole: bool


def race(appraiser: Appraiser, layouts: Sequence[Layout], has_time: Callable[[], bool]) -> Race:
    """Compare layouts.

    Only layouts that may still be the best get the trials of a stage. The race ends when one is left.

    Args:
        layouts: their goodput is known.
        has_time: whether another stage may begin.
    """
    standing = contenders(appraiser, layouts)
    is_whole = True
    for seeds, precision in _STAGES:
        most = max(map(appraiser.carried, standing))
        if len(standing) == 1 or most <= 0:
            break  # where none carries a rate, there is none from which a search could begin
        if not has_time():
            is_whole = False
            break
        appraiser.search_goodput(standing, seeds, most, precision)
        standing = contenders(appraiser, standing)
    standing = _ordered(appraiser, standing)
    rest = [layout for layout in layouts if layout not in standing]
    return Race([*standing, *_ordered(appraiser, rest)], standing[1:], is_whole)


def contenders(appraiser: Appraiser, layouts: Sequence[Layout]) -> list[Layout]:
    """The best layout, and those that are not shown to carry less: the interval of the difference includes 0."""
    best, *others = _ordered(appraiser, layouts)
    return [best, *(layout for layout in others if not appraiser.is_separate(best, layout))]


def _ordered(appraiser: Appraiser, layouts: Sequence[Layout]) -> list[Layout]:
    """Those that carry most first, and of equal ones those with the fewest roles."""
    return sorted(layouts, key=lambda layout: (-appraiser.carried(layout), len(layout.groups)))
