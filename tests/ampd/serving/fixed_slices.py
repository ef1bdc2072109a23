"""A slicing policy with one answer."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.policies.base import Slice, SlicingSituation


@dataclass
class FixedSlices:
    """Gives one answer, and turns of 100 tokens; keeps the last situation."""

    answer: Slice
    is_whole: bool = False
    shares_passes: bool = False
    situation: SlicingSituation | None = None

    def slice(self, situation: SlicingSituation) -> Slice:
        self.situation = situation
        return self.answer

    def turn(self, situation: SlicingSituation) -> int:
        self.situation = situation
        return 100
