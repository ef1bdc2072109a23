"""Layouts in proportion to a part: as many copies as wanted, each kind rounded up."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from planner.layout.copies import copies_between, in_proportion
from planner.layout.layout import Layout

COUNTS = st.integers(1, 12)
PARTS = st.builds(lambda single, double, four: Layout(((1, single), (4, four)), ((2, double),)), COUNTS, COUNTS, COUNTS)


@given(PARTS, st.floats(0.1, 12.0), st.integers(1, 12))
def test_the_copies_suffice_each_layout_comes_once_and_all_copies_come_last(
    part: Layout, least: float, most: int
) -> None:
    found = copies_between(part, least, most)
    layouts = [in_proportion(part, copies) for copies in found]
    assert len(set(layouts)) == len(layouts)
    assert [layout.gpus for layout in layouts] == sorted({layout.gpus for layout in layouts})
    assert found[-1] == most
    assert layouts[-1].gpus == most * part.gpus
    assert all(copies >= min(least, most) for copies in found)
    assert layouts[0].gpus <= in_proportion(part, Fraction(min(least, most))).gpus, "no fewer would do"


def test_a_ninth_that_carries_more_than_its_share_needs_fewer_replicas() -> None:
    part = Layout(((8, 2),), ((8, 1),))
    layouts = [in_proportion(part, copies) for copies in copies_between(part, 6.3, 9)]
    assert layouts[0] == Layout(((8, 13),), ((8, 7),))
    assert layouts[-1] == Layout(((8, 18),), ((8, 9),))
