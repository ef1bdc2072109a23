"""Combinations: modes that are whole systems fix their policies, and labels tell combinations apart."""

from __future__ import annotations

from itertools import product

from ampd.policies import defaults
from planner.combination import Combination, Mode

POLICIES = ("always-remote", "ampd"), ("fcfs", "edf"), ("whole", defaults.SLICING), ("arrow", defaults.POOLS)


def test_whole_systems_fix_their_policies() -> None:
    for mode in set(Mode) - {Mode.DISAGGREGATED}:
        made = {Combination.of(mode, *policies, rate=2.0) for policies in product(*POLICIES)}
        (only,) = made
        assert (only.slicing, only.pools, only.rate, only.label) == ("whole", "static", 2.0, str(mode))
        assert only.named == {}


def test_labels_tell_combinations_apart_and_leave_out_the_defaults() -> None:
    made = [Combination.of(Mode.DISAGGREGATED, *policies, rate=None) for policies in product(*POLICIES)]
    assert len({each.label for each in made}) == len(made)
    for each in made:
        assert ("slicing" in each.label) == ("slicing" in each.named) == (each.slicing != defaults.SLICING)
        assert ("pools" in each.label) == ("pools" in each.named) == (each.pools != defaults.POOLS)
