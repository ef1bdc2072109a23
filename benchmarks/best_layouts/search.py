"""The highest sustained rate of entries, and the best of many; each simulation is kept in a file at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.best_layouts.entries import Entry, our_parts, ours, rivals
from benchmarks.policies import contest
from benchmarks.policies.campaign import Ledger, Task
from benchmarks.policies.contest import TARGET, Found, Point, fields_of, measure, run
from benchmarks.policies.settings import Setting
from benchmarks.rate_search import RateSearch
from planner.simulator.outcome import SimulationRun
from workloads.trace import Session

CRITERIA = {name: name.removeprefix("sustained_") for name in contest.CRITERIA}
"""The criteria of the search, and their names in tables."""
_FIRST_SHARE = 1 / 3
_FAR = 0.8
"""An entry that attains less than this in the first third of the arrivals is not tried further: queues begin empty."""
_START_SHARE = 0.4
"""The first sessions, as a share, load the workers and do not count: roles that follow the load need a while."""


@dataclass(frozen=True)
class Goodput:
    """One entry's highest sustained rate in sessions per second."""

    entry: Entry
    rate: float


def simulated(entry: Entry, seed: int, rate: float) -> Point:
    """The figures of one simulation, without its first sessions."""
    return measure(entry.setting, *_after_the_start(*run(entry.setting, entry.contestant, rate, seed)))


@dataclass
class Searcher:
    """Searches of one setting.

    Args:
        precision: the rate that is found and the next one that fails are at most this factor apart.
        report: gets a line for each entry that is better than all before it.
        simulate: (entry, seed, rate) -> the figures of one simulation.
    """

    ledger: Ledger
    precision: float
    report: Callable[[str], None]
    simulate: Callable[[Entry, int, float], Point] = simulated

    def goodput(self, entry: Entry, seed: int, start: Mapping[str, float]) -> dict[str, float]:
        """Rates by criterion; `start`: where to begin."""
        search = self._search(entry, seed)
        return {criterion: search.highest(TARGET, criterion, start[criterion]) for criterion in CRITERIA}

    def best(self, entries: Sequence[Entry], seed: int, start: Mapping[str, float]) -> dict[str, Goodput]:
        """The entry with the highest rate, by criterion.

        Entries are tried in turn. One that fails at a rate a step of the precision above the best so far is out.
        """
        best: dict[str, Goodput] = {}
        for entry in entries:
            search = self._search(entry, seed)
            for criterion in CRITERIA:
                to_beat = best[criterion].rate * self.precision if criterion in best else 0.0
                if to_beat and not self._beats(entry, seed, search, criterion, to_beat):
                    continue
                rate = search.highest(TARGET, criterion, to_beat or start[criterion])
                if criterion not in best or rate > best[criterion].rate:
                    best[criterion] = Goodput(entry, rate)
                    self.report(f"  {criterion}: {rate:.4g} {entry.label}")
        return best

    def _beats(self, entry: Entry, seed: int, search: RateSearch[Point], criterion: str, rate: float) -> bool:
        short = replace(entry.setting, duration_s=entry.setting.duration_s * _FIRST_SHARE)
        begin = self.point(Entry(entry.contestant, short), seed, rate)
        if getattr(begin, CRITERIA[criterion]) < _FAR:
            return False
        if rate not in search.tried:
            search.tried[rate] = self.point(entry, seed, rate)
        return bool(getattr(search.tried[rate], criterion) >= TARGET)

    def _search(self, entry: Entry, seed: int) -> RateSearch[Point]:
        return RateSearch(lambda rate: self.point(entry, seed, rate), self.precision, first_step=1.25)

    def point(self, entry: Entry, seed: int, rate: float) -> Point:
        """The figures of one simulation: made now, unless the file has them."""
        task = Task(entry.setting, entry.contestant, seed, rates=(rate,))
        found = self.ledger.found(task)
        if found is None:
            begin_s = time.perf_counter()
            point = self.simulate(entry, seed, rate)
            # A run that goes on reads rounded figures, so this one uses the same.
            found = Found({}, {rate: Point(**fields_of(point))})
            self.ledger.keep(task, found, time.perf_counter() - begin_s)
        return found.points[rate]


@dataclass(frozen=True)
class Outcome:
    """All of one setting at one seed.

    Attributes:
        ours: label of a contestant on the even split -> criterion -> rate.
        best: `RIVAL` or `PARTS` -> criterion -> the best entry.
    """

    ours: Mapping[str, Mapping[str, float]]
    best: Mapping[str, Mapping[str, Goodput]]


RIVAL, PARTS = "best rival", "best of our parts"


def first_start(setting: Setting) -> dict[str, float]:
    """Sessions per second at which the first search of a setting begins. It may be far off."""
    return dict.fromkeys(CRITERIA, 0.1 if setting.trace == "coding-agents" else 1.0)


def first_outcome(searcher: Searcher, setting: Setting, only: Sequence[Entry] | None = None) -> Outcome:
    """The first seed: the best layouts are searched.

    Args:
        only: the only rivals that are tried; None: all.
    """
    near = first_start(setting)
    best = {PARTS: searcher.best(our_parts(setting), 0, near)}
    near = _positive({criterion: goodput.rate for criterion, goodput in best[PARTS].items()})
    best[RIVAL] = searcher.best(rivals(setting) if only is None else only, 0, near)
    found = {entry.contestant.label: searcher.goodput(entry, 0, near) for entry in ours(setting)}
    return Outcome(found, best)


def further_outcome(searcher: Searcher, setting: Setting, seed: int, first: Outcome) -> Outcome:
    """Another seed: ours, and the entries that were the best ones at the first seed."""
    found = {}
    for entry in ours(setting):
        label = entry.contestant.label
        found[label] = searcher.goodput(entry, seed, _positive(first.ours[label]))
    best: dict[str, dict[str, Goodput]] = {}
    for kind, by_criterion in first.best.items():
        start = _positive({criterion: goodput.rate for criterion, goodput in by_criterion.items()})
        best[kind] = {
            criterion: Goodput(goodput.entry, searcher.goodput(goodput.entry, seed, start)[criterion])
            for criterion, goodput in by_criterion.items()
        }
    return Outcome(found, best)


def _positive(rates: Mapping[str, float]) -> dict[str, float]:
    """Where a search may begin."""
    return {criterion: rate or 0.01 for criterion, rate in rates.items()}


def _after_the_start(sessions: Sequence[Session], done: SimulationRun) -> tuple[Sequence[Session], SimulationRun]:
    """The sessions that count, and their rounds."""
    counted = sessions[int(_START_SHARE * len(sessions)) :]
    names = {session.session_id for session in counted}
    rounds = [record for record in done.rounds if record.session_id in names]
    planned = {name: count for name, count in done.rounds_planned.items() if name in names}
    return counted, replace(done, rounds=rounds, rounds_planned=planned)
