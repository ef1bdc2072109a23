"""Combinations: modes that are whole systems fix their policies, and labels tell combinations apart."""

from __future__ import annotations

from itertools import product

from ampd.policies import defaults
from planner.case_settings import Combination, Mode

POLICIES = ("always-remote", "ampd"), ("fcfs", "edf"), ("whole", defaults.SLICING), ("arrow", defaults.POOLS)


def test_whole_systems_fix_their_policies() -> None:
    for mode in set(Mode) - {Mode.DISAGGREGATED, Mode.COLOCATED}:
        made = {Combination.of(mode, *policies, rate=2.0) for policies in product(*POLICIES)}
        (only,) = made
        assert (only.slicing, only.pools, only.rate, only.label) == ("whole", "static", 2.0, str(mode))
        assert only.named == {}


def test_colocated_workers_take_the_ordering_and_the_slicing_that_are_named() -> None:
    plain = Combination.of(Mode.COLOCATED, "ampd", None, None, "arrow", 2.0)
    ours = Combination.of(Mode.COLOCATED, "ampd", "on-time", "slack", "arrow", 2.0)
    ordered = Combination.of(Mode.COLOCATED, "ampd", "on-time", None, "arrow", 2.0)

    assert (plain.routing, plain.ordering, plain.slicing, plain.pools) == ("always-local", "fcfs", "whole", "static")
    assert (ours.routing, ours.ordering, ours.slicing, ours.pools) == ("always-local", "on-time", "slack", "static")
    assert (ordered.ordering, ordered.slicing) == ("on-time", "whole")
    assert [each.label for each in (plain, ordered, ours)] == [
        "colocated",
        "colocated / on-time",
        "colocated / on-time / slicing slack",
    ]
    assert (plain.named, ours.named) == ({}, {"slicing": "slack"})


def test_without_names_the_split_has_the_defaults() -> None:
    made = Combination.of(Mode.DISAGGREGATED, "ampd", None, None, "static", 2.0)
    assert made == Combination.of(Mode.DISAGGREGATED, "ampd", defaults.ORDERING, defaults.SLICING, "static", 2.0)


def test_labels_tell_combinations_apart_and_leave_out_the_defaults() -> None:
    made = [Combination.of(Mode.DISAGGREGATED, *policies, rate=None) for policies in product(*POLICIES)]
    assert len({each.label for each in made}) == len(made)
    for each in made:
        assert ("slicing" in each.label) == ("slicing" in each.named) == (each.slicing != defaults.SLICING)
        assert ("pools" in each.label) == ("pools" in each.named) == (each.pools != defaults.POOLS)
