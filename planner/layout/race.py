"""Which of several good layouts carries most: those that trials cannot tell apart get further seeds and finer rates."""

from __future__ import annotations

from collections.abc import Sequence

from planner.layout.appraisal import Appraiser
from planner.layout.layout import Layout

_STAGES = ((6, 1.025), (12, 1.0125))
"""Seeds and precision of the goodput, in the order in which layouts get them."""


def race(appraiser: Appraiser, layouts: Sequence[Layout]) -> None:
    """Give further trials to the layouts that may still be the best, until one is left.

    Args:
        layouts: their goodput is known.
    """
    standing = contenders(appraiser, layouts)
    for seeds, precision in _STAGES:
        most = max(map(appraiser.carried, standing))
        if len(standing) == 1 or most <= 0:
            break  # where none carries a rate, there is none from which a search could begin
        appraiser.search_goodput(standing, seeds, most, precision)
        standing = contenders(appraiser, standing)


def ranking(appraiser: Appraiser, layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts, those that carry most first. Those that may carry as much as the first one come next.

    Layouts that stayed in the race are compared by all their seeds, because those that left it have fewer.
    """
    first = contenders(appraiser, layouts)
    others = _ordered(appraiser, [layout for layout in layouts if layout not in first])
    if _common_seeds(appraiser, first) > _common_seeds(appraiser, layouts):
        first = ranking(appraiser, first)
    return [*first, *others]


def tied(appraiser: Appraiser, best: Layout, layouts: Sequence[Layout]) -> list[Layout]:
    """The other layouts that are not shown to carry less than the best one.

    Nothing is known of that where none carries a rate, or where no rate was too high.
    """
    if not appraiser.carried(best):
        return []
    known = [layout for layout in layouts if layout != best and appraiser.gain(best, layout) is not None]
    return [layout for layout in known if not appraiser.is_separate(best, layout)]


def contenders(appraiser: Appraiser, layouts: Sequence[Layout]) -> list[Layout]:
    """The best layout, and those that are not shown to carry less: the interval of the difference includes 0."""
    ordered = _ordered(appraiser, layouts)
    best = next(layout for layout in ordered if not any(appraiser.is_separate(other, layout) for other in ordered))
    others = [layout for layout in ordered if layout != best]
    return [best, *(layout for layout in others if not appraiser.is_separate(best, layout))]


def _ordered(appraiser: Appraiser, layouts: Sequence[Layout]) -> list[Layout]:
    """Those that carry most first, with the seeds that all of them have. Of equal ones those with the fewest roles."""
    seeds = _common_seeds(appraiser, layouts)
    return sorted(layouts, key=lambda layout: (-appraiser.carried(layout, seeds), len(layout.groups)))


def _common_seeds(appraiser: Appraiser, layouts: Sequence[Layout]) -> int:
    return min(map(appraiser.seeds, layouts), default=0)
