"""The moves between layouts: within the GPUs, and from every layout to every other."""

from __future__ import annotations

from collections import Counter

import pytest

from ampd.types import Role
from planner.layout.layout import Layout
from planner.layout.search import counts_of, filled, layout_of, neighbours

SPLIT = Layout(((2, 1),), ((2, 1),))
DEGREES = (1, 2, 4)


def test_a_move_stays_within_the_gpus_and_leaves_an_owner_of_sessions() -> None:
    for most in (3, 4, 6):
        found = neighbours(SPLIT, DEGREES, most)
        assert found
        assert len(set(found)) == len(found)
        assert SPLIT not in found
        for layout in found:
            assert layout.gpus <= most
            assert layout.decode or layout.mixed


def test_a_single_mixed_replica_is_co_located() -> None:
    alone = Layout((), ((8, 1),))
    assert layout_of(Counter({(Role.MIXED, 8): 1})) == alone
    assert layout_of(Counter({(Role.MIXED, 8): 2})) == Layout((), (), ((8, 2),))
    assert not any(layout.mixed and not layout.decode for layout in neighbours(alone, (8,), 8))


@pytest.mark.parametrize(
    "layout",
    [
        Layout((), ((2, 2),)),  # co-located
        Layout((), ((4, 1),)),  # merged into one
        Layout((), ((2, 1),), ((2, 1),)),  # mixed
        Layout(((1, 2),), ((2, 1),)),  # split in two
        Layout(((1, 1),), ((1, 1), (2, 1))),  # split over the roles
        Layout((), ((2, 1),)),  # one less
        Layout(((1, 1), (2, 1)), ((2, 1),)),  # one more
        Layout(((4, 1),), ((2, 1),)),  # a larger degree
    ],
)
def test_each_kind_of_move_is_one_step(layout: Layout) -> None:
    assert layout in neighbours(SPLIT, DEGREES, 6)


def test_every_layout_is_reached() -> None:
    reached, fresh = {SPLIT}, [SPLIT]
    while fresh:
        fresh = [layout for each in fresh for layout in neighbours(each, DEGREES, 4) if layout not in reached]
        reached.update(fresh)
    without_mixed = {layout for layout in reached if not layout.mixed}
    counts = range(5)
    every = {
        Layout(
            tuple((degree, count) for degree, count in zip(DEGREES, prefill, strict=True) if count),
            tuple((degree, count) for degree, count in zip(DEGREES, decode, strict=True) if count),
        )
        for prefill in ((a, b, c) for a in counts for b in counts[:3] for c in counts[:2])
        for decode in ((a, b, c) for a in counts for b in counts[:3] for c in counts[:2])
    }
    assert without_mixed == {layout for layout in every if layout.decode and layout.gpus <= 4}


def test_counts_and_layouts_are_the_same_thing() -> None:
    layout = Layout(((1, 3), (4, 1)), ((2, 2),), ((8, 1),))
    assert layout_of(counts_of(layout)) == layout
    assert counts_of(layout)[Role.PREFILL, 1] == 3


def test_gpus_that_are_left_are_filled_with_replicas_that_raise_the_bound() -> None:
    layout = Layout(((2, 1),), ((1, 1),))

    def useful(each: Layout) -> float:
        return float(sum(degree * count for degree, count in each.decode))

    assert filled(layout, (1, 2, 4), 8, useful) == Layout(((2, 1),), ((1, 2), (4, 1)))
    assert filled(layout, (1, 2, 4), 3, useful) == layout
    assert filled(layout, (1, 2, 4), 8, lambda _: 1.0) == layout
