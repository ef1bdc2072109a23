"""What a contest's results say: means over seeds, best rivals, ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.geometric import geometric_interval
from benchmarks.intervals import Interval, mean_interval
from benchmarks.policies.campaign import Ledger, Task
from benchmarks.policies.contest import USUAL, Condition, Contestant, Found, Point
from benchmarks.policies.contestants import OUR_PARTS, OURS, REFERENCES
from benchmarks.policies.settings import Setting

Groups = dict[str, list[Setting]]
"""Settings by the name of their group."""


@dataclass(frozen=True)
class Standings:
    """Reads the results of some settings and contestants under one condition."""

    ledger: Ledger
    settings: Sequence[Setting]
    contestants: Sequence[Contestant]
    seeds: int
    condition: Condition = USUAL

    @property
    def rivals(self) -> list[Contestant]:
        """On the same split as ours, and not made of our parts."""
        return [contestant for contestant in self.contestants if contestant not in (*OUR_PARTS, *REFERENCES)]

    @property
    def references(self) -> list[Contestant]:
        return [contestant for contestant in self.contestants if contestant in REFERENCES]

    def found(self, setting: Setting, contestant: Contestant) -> list[Found]:
        """Results by seed, as far as there are any."""
        tasks = [Task(setting, contestant, seed, self.condition) for seed in range(self.seeds)]
        return [found for task in tasks if (found := self.ledger.found(task)) is not None]

    def values(self, setting: Setting, contestant: Contestant, criterion: str) -> list[float]:
        return [found.goodput[criterion] for found in self.found(setting, contestant)]

    def goodput(self, setting: Setting, contestant: Contestant, criterion: str) -> Interval | None:
        """None: not searched."""
        values = self.values(setting, contestant, criterion)
        return mean_interval(values) if values else None

    def best(self, setting: Setting, among: Sequence[Contestant], criterion: str) -> Contestant | None:
        """The one with the highest mean; None if none of them carries anything."""
        means = {each: interval.mean for each in among if (interval := self.goodput(setting, each, criterion))}
        best = max(means, key=lambda contestant: means[contestant], default=None)
        return best if best is not None and means[best] > 0 else None

    def ratio(
        self, setting: Setting, ours: Contestant, other: Contestant | None, criterion: str
    ) -> tuple[float, float, float] | None:
        """(ours / the other's, ends of the 95 % interval) over common seeds; None: the other carries nothing.

        Seed by seed, as both have the same sessions; the geometric mean where no seed has a 0, else the ratio of the
        means without an interval.
        """
        if other is None:
            return None
        pairs = list(zip(self.values(setting, ours, criterion), self.values(setting, other, criterion), strict=False))
        if not pairs or not sum(theirs for _, theirs in pairs):
            return None
        if min(map(min, pairs)) > 0:
            return geometric_interval([mine / theirs for mine, theirs in pairs])
        mean = sum(mine for mine, _ in pairs) / sum(theirs for _, theirs in pairs)
        return mean, 0.0, float("inf")

    def ratios(
        self, settings: Sequence[Setting], other: Callable[[Setting], Contestant | None], criterion: str
    ) -> list[float]:
        """Ours against another contestant in every setting where that one carries something."""
        found = [self.ratio(setting, OURS, other(setting), criterion) for setting in settings]
        return [ratio[0] for ratio in found if ratio is not None]

    def points(self, setting: Setting, contestant: Contestant) -> dict[float, Point]:
        """The first seed's simulations by rate, in order; other seeds tried other rates."""
        found = self.ledger.found(Task(setting, contestant, 0, self.condition))
        return dict(sorted(found.points.items())) if found else {}
