"""Alternatives are of other kinds than the best layout, and of each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.layout.alternatives import of_other_kinds
from planner.layout.layout import Layout, replicas_of
from planner.layout.neighbours import counts_of

GROUPS = st.dictionaries(st.sampled_from([1, 2, 4]), st.integers(1, 3), max_size=2).map(replicas_of)
LAYOUTS = st.builds(Layout, GROUPS, GROUPS.filter(bool))


def test_a_colocated_layout_is_among_them_although_it_ranks_last() -> None:
    best = Layout(((2, 3),), ((4, 1),))
    same, other, third = Layout(((2, 4),), ((4, 1),)), Layout(((2, 3),), ((8, 1),)), Layout(((4, 1),), ((8, 1),))
    colocated = Layout((), ((8, 2),))
    ranked = [best, same, other, third, colocated]
    assert of_other_kinds(best, ranked, 2) == [other, colocated]
    assert of_other_kinds(best, ranked, 9) == [other, third, colocated]
    assert of_other_kinds(best, ranked, 0) == []
    assert of_other_kinds(colocated, ranked, 1) == [best]


@given(LAYOUTS, st.lists(LAYOUTS, max_size=6), st.integers(0, 3))
def test_no_two_are_of_one_kind_and_other_roles_are_there_if_there_are_any(
    best: Layout, ranked: list[Layout], count: int
) -> None:
    found = of_other_kinds(best, ranked, count)
    kinds = [frozenset(counts_of(layout)) for layout in [best, *found]]
    assert len(set(kinds)) == len(kinds)
    assert len(found) <= count
    has_others = any(bool(layout.prefill) != bool(best.prefill) for layout in ranked)
    assert not found or any(bool(layout.prefill) != bool(best.prefill) for layout in found) == has_others
