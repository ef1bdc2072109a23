"""A slicing policy with one answer."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.policies.base import SlicingSituation


@dataclass
class FixedSlices:
    """Gives one answer; keeps the last situation."""

    answer: int
    situation: SlicingSituation | None = None

    def slice(self, situation: SlicingSituation) -> int:
        self.situation = situation
        return self.answer
