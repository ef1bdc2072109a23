"""A small setting, and a search that takes no time."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.policies.contest import USUAL, Contestant, Found, Point
from benchmarks.policies.contestants import ALWAYS_REMOTE, OURS
from benchmarks.policies.settings import Setting

TINY = Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02, duration_s=5.0)
PAIRS = [(TINY, OURS, USUAL), (TINY, ALWAYS_REMOTE, USUAL)]


@dataclass
class Counted:
    """A search that takes no time, counted."""

    calls: int = 0

    def __call__(self, _: Setting, contestant: Contestant, seed: int, *__: object) -> Found:
        self.calls += 1
        value = 1.0 if contestant == OURS else 0.4
        goodput = dict.fromkeys(("sustained_rounds", "sustained_sessions"), value + seed / 10)
        return Found(goodput, {value: Point(1.0, 1.0, 1.0, 2.0, 2.0, 0.0)})
