"""The contestants and ablations: all can be made, and each is there once."""

from __future__ import annotations

from benchmarks.policies.contestants import ABLATION, ALL


def test_every_contestant_and_every_ablation_exists() -> None:
    assert len({each.label for each in ALL}) == len(ALL)
    # Ours with fixed roles takes part in both.
    assert len({each.spec for each in (*ALL, *ABLATION)}) == len(ALL) + len(ABLATION) - 1
    assert not any("," in each.label for each in ALL), "flags list them with commas"
    for each in (*ALL, *ABLATION):
        each.policies("default" if each.is_fitted else None)
