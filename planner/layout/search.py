"""The search for layouts: an integer programme proposes them, simulations of the whole cluster decide.

Every layout is judged by the same sessions and arrivals, so that differences are differences of the layouts (common
random numbers).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, zip_longest
from math import ceil
from statistics import fmean

from ampd.reports import format_number
from ampd.types import Role
from planner.layout.candidate import CHOOSING, HELD_OUT, Candidate, next_rate
from planner.layout.fluid import costs_of, fewest_gpus, most_rate, proposals
from planner.layout.layout import Layout, PlanCase, replicas_of
from planner.layout.trial import DECIDES, LONG, RANKS, SHORT, Trials, TrialTask

FINALISTS = 6
"""Layouts whose goodput is searched with several seeds."""
_PRECISION, _COARSE = 1.025, 1.1
"""Of the goodput of all seeds together, and of that of a single one, from which only the interval comes."""
_ABOVE_BOUND = 1.5
"""A layout may carry this much more than its fluid rate, because passes and larger batches save time (seen: 1.37)."""
_RESERVE = 1.25
"""The first guess is expected to carry this many times the rate."""
_CLOSE = 0.03
"""A short trial that misses the wanted shares by at most this much says little, because a few bursts decide it."""
_CENTRES, _CENTRES_OF_ROLES = 3, 2
"""Neighbours are tried of this many of the best layouts, and of the best ones with the same roles. One good proposal
may otherwise fill the places with its own neighbours, all co-located for example."""
_NEAR = 8
"""Most neighbours of one layout that are tried."""
_ROUNDS = 3
"""Most rounds of the local search."""
_JUST_ABOVE = 1.04
"""Layouts are told apart best at this many times the highest rate that is carried."""
_GROWTH = 1.15
"""Factor of the GPUs beyond the number that should carry the rate."""


class Search:
    """Looks for layouts of one case.

    Attributes:
        candidates: all layouts that were tried.
        best: the layouts to show so far, best first.
    """

    def __init__(self, case: PlanCase, trials: Trials) -> None:
        self.case = case
        self.candidates: dict[Layout, Candidate] = {}
        self.best: list[Candidate] = []
        self._trials = trials
        self._costs = costs_of(case)
        self._expected = self._costs.with_queues()

    def fewest(self) -> bool:
        """Whether a layout carries the case's rate. `best` then begins with the one of the fewest GPUs.

        The numbers of GPUs are tried from below. A layout must carry the rate with the seeds that choose, and then with
        held-out ones too.
        """
        rate = self.case.rate
        guess = self._candidate(self._guess())
        self.best = [guess]
        self._show("proposed by the integer programme")
        self._try_short([guess])
        if guess.carries(rate):
            self._show(f"carries {format_number(rate)} sessions/s in a short trial")
        for gpus in self._sizes():
            able = self._close(gpus)[:FINALISTS]
            self.try_at(able, rate, CHOOSING)
            passing = [each for each in able if each.carries(rate)]
            for each in sorted(passing, key=lambda each: (each.layout.gpus, -_shares(each, rate))):
                if self._is_confirmed(each):
                    self.best = [each, *(other for other in passing if other is not each and other.carries(rate))]
                    self._show(f"carries {format_number(rate)} sessions/s, with held-out seeds too")
                    return True
        return False

    def most(self) -> None:
        """Find the layouts that carry most on the case's GPUs, as `best`."""
        self.best = self._proposed(self.case.gpus)
        self._show("proposed by the integer programme")
        rate = self._just_above(self.best[:2], max(self._expected.bound(each.layout) for each in self.best))
        self.best, centres = self._ranked(self.best, rate), set[Layout]()
        for _ in range(_ROUNDS):
            fresh = [each for each in _centres(self.best) if each.layout not in centres]
            if not fresh:
                break
            centres.update(each.layout for each in fresh)
            self.best = self._ranked([*self.best, *self._near(fresh, self.case.gpus)], rate)
            if self.best[0].carried([0])[rate]:
                rate = self._just_above(self.best[:1], rate)
                self.best = self._ranked(self.best[: 2 * FINALISTS], rate)
        self.best = self.best[:FINALISTS]
        for seeds in (CHOOSING[:1], CHOOSING):
            self.search_goodputs(self.best, seeds, rate)
            self.best = best_first(self.best)
            self._show(f"carries {format_number(self.best[0].most)} sessions/s")

    def try_at(
        self, candidates: Sequence[Candidate], rate: float, seeds: Sequence[int], *, for_figures: bool = False
    ) -> None:
        """Make the long trials at a rate that are missing. `for_figures`: to their end, also where they fail."""
        wanted = [
            (each, rate, seed)
            for each in candidates
            for seed in seeds
            if (known := each.trials.get((rate, seed))) is None or (for_figures and known.result is None)
        ]
        self._run(wanted, None if for_figures else DECIDES, keeps_result=True)

    def search_goodputs(
        self, candidates: Sequence[Candidate], seeds: Sequence[int], start: float, *, with_interval: bool = False
    ) -> None:
        """Search the highest rate of each layout, by halving, all layouts at the same time.

        `with_interval`: of each single seed too.
        """
        first, together = [(seeds[:1], _COARSE)], [(seeds, _PRECISION)]
        groups = first + together + [([seed], _COARSE) for seed in seeds if with_interval]
        while tasks := [task for each in candidates for task in self._next_tasks(each, groups, start)]:
            self._run(tasks, DECIDES)
        for each in candidates:
            each.seeds = tuple(seeds)

    def _next_tasks(
        self, candidate: Candidate, groups: Sequence[tuple[Sequence[int], float]], start: float
    ) -> list[tuple[Candidate, float, int]]:
        """The trials at the next rate of a layout: of the first group of seeds whose goodput is not known.

        `groups`: seeds, and the precision of their goodput together.
        """
        most = 2 * self._costs.bound(candidate.layout)
        for group, precision in groups:
            rate = next_rate(candidate.carried(group), start, most, precision)
            if rate is not None:
                return [(candidate, rate, seed) for seed in group if (rate, seed) not in candidate.trials]
            start = candidate.goodput(group) or start
        return []

    def _is_confirmed(self, candidate: Candidate) -> bool:
        """Whether it carries the rate with seeds that did not choose it."""
        rate = self.case.rate
        self.try_at([candidate], rate, HELD_OUT)
        if not candidate.carried(HELD_OUT)[rate]:
            candidate.refused = rate
        return candidate.carries(rate)

    def _sizes(self) -> Iterator[int]:
        """Numbers of GPUs from the fewest that could compute the rate, ascending."""
        most = self.case.gpus
        bare = self._costs.without_memory()
        gpus = fewest_gpus(bare, most, self.case.rate / _ABOVE_BOUND) or most
        expected = fewest_gpus(self._expected, most, self.case.rate) or most
        while gpus < most:
            yield gpus
            gpus = gpus + 1 if gpus <= expected else ceil(_GROWTH * gpus)
        yield most

    def _close(self, gpus: int) -> list[Candidate]:
        """Further layouts of these GPUs that carry the case's rate in a short trial, or nearly, best first."""

        def able(candidates: Collection[Candidate]) -> list[Candidate]:
            return [each for each in candidates if _ABOVE_BOUND * self._costs.bound(each.layout) >= self.case.rate]

        proposed = able(self._proposed(gpus))
        self._try_short(proposed)
        near = able(self._near(self._by_first(proposed)[:_CENTRES], gpus))
        self._try_short(near)
        found = {each.layout: each for each in [*proposed, *near]}
        level = self.case.attainment
        return [
            each
            for each in self._by_first(list(found.values()))
            if each.first is not None
            and each.first.is_whole
            and each.first.reserve(level) >= -_CLOSE
            and (self.case.rate, 0) not in each.trials
        ]

    def _guess(self) -> Layout:
        """A layout with a reserve. No trial has shown yet that it carries the rate."""
        gpus = fewest_gpus(self._expected, self.case.gpus, _RESERVE * self.case.rate) or self.case.gpus
        found = most_rate(self._expected, gpus)
        return found[0] if found else Layout((), ((min(self.case.degrees), 1),))

    def _proposed(self, gpus: int) -> list[Candidate]:
        """What the programme proposes, best first. Queues cost less than expected where many small replicas share them,
        so every other proposal is made without."""
        ranked = (
            sorted(proposals(costs, gpus), key=lambda layout: -costs.bound(layout))
            for costs in (self._expected, self._costs)
        )
        found = dict.fromkeys(chain.from_iterable(zip_longest(*ranked)))
        return [self._candidate(layout) for layout in found if layout is not None]

    def _near(self, centres: Sequence[Candidate], gpus: int) -> list[Candidate]:
        """Neighbours within the GPUs. Of each layout those come first that are expected to carry most."""
        found: dict[Layout, None] = {}
        for centre in centres:
            near = neighbours(centre.layout, self.case.degrees, gpus)
            found |= dict.fromkeys(sorted(near, key=lambda layout: -self._expected.bound(layout))[:_NEAR])
        return [self._candidate(layout) for layout in found]

    def _just_above(self, candidates: Sequence[Candidate], start: float) -> float:
        """A rate that is a little too high for the best of these layouts."""
        while tasks := [task for each in candidates for task in self._next_tasks(each, [((0,), _COARSE)], start)]:
            self._run(tasks, DECIDES)
        return _JUST_ABOVE * max(each.goodput([0]) for each in candidates) or start

    def _ranked(self, candidates: Sequence[Candidate], rate: float) -> list[Candidate]:
        """The layouts, those first that do best in one trial at this rate."""
        distinct = {each.layout: each for each in candidates}
        fresh = [(each, rate, 0) for each in distinct.values() if (rate, 0) not in each.trials]
        self._run(fresh, RANKS)
        return sorted(distinct.values(), key=lambda each: each.trials[rate, 0].rank(self.case.attainment))

    def _by_first(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        def rank(each: Candidate) -> tuple[int, float]:
            return (3, 0.0) if each.first is None else each.first.rank(self.case.attainment)

        return sorted(candidates, key=rank)

    def _try_short(self, candidates: Sequence[Candidate]) -> None:
        """Make the short trials at the case's rate that are missing."""
        by_task = {self.short_task(each): each for each in candidates if each.first is None}
        for task, trial in self._trials.run(list(by_task)):
            by_task[task].first = trial

    def expected_rate(self, layout: Layout) -> float:
        """About what a layout carries, before any simulation."""
        return self._expected.bound(layout) or 1.0

    def short_task(self, candidate: Candidate) -> TrialTask:
        return TrialTask(candidate.layout, self.case.rate, SHORT, self.case.options.seed, DECIDES)

    def _run(
        self, wanted: Sequence[tuple[Candidate, float, int]], margin: float | None, *, keeps_result: bool = False
    ) -> None:
        """Make long trials: (layout, sessions per second, seed)."""
        first_seed = self.case.options.seed
        by_task = {
            TrialTask(each.layout, rate, LONG, first_seed + seed, margin, keeps_result): (each, rate, seed)
            for each, rate, seed in wanted
        }
        for task, trial in self._trials.run(list(by_task)):
            each, rate, seed = by_task[task]
            each.trials[rate, seed] = trial

    def _candidate(self, layout: Layout) -> Candidate:
        return self.candidates.setdefault(layout, Candidate(layout, self.case.attainment))

    def _show(self, known: str) -> None:
        """Print the best layout so far, and what is known of it."""
        self._trials.show(f"{self.best[0].layout}, {known}")


def best_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that carry most first. Of those that are not told apart the simplest: the fewest roles, no mixed replicas,
    then the fewest GPUs."""
    ordered = sorted(candidates, key=lambda each: -each.most)
    equal = [each for each in ordered if each.most * _PRECISION >= ordered[0].most]
    best = min(equal, key=lambda each: (len(each.layout.groups), bool(each.layout.mixed), each.layout.gpus))
    return [best, *(each for each in ordered if each is not best)]


def _centres(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The best layouts, and the best ones of each set of roles."""
    of_roles: defaultdict[frozenset[Role], list[Candidate]] = defaultdict(list)
    for each in ranked:
        of_roles[frozenset(each.layout.groups)].append(each)
    best = [ranked[:_CENTRES], *(group[:_CENTRES_OF_ROLES] for group in of_roles.values())]
    return list({each.layout: each for each in chain.from_iterable(best)}.values())


def _shares(candidate: Candidate, rate: float) -> float:
    return fmean(trial.met for trial in candidate.at(rate))


# -- the layouts next to a layout: one replica more, less, split, merged or in another role

Counts = Counter[tuple[Role, int]]
"""(role, degree) -> replicas."""

_RAISED = 1 + 1e-9
"""Less than this factor is rounding."""
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL, Role.MIXED: Role.DECODE}
"""The role that one replica changes to."""
_TOGETHER = ((Role.PREFILL, Role.DECODE), (Role.PREFILL, Role.MIXED), (Role.MIXED, Role.PREFILL))
"""Roles that all replicas of a role change together: to co-located serving, to mixed workers and back."""


def neighbours(layout: Layout, degrees: Sequence[int], most_gpus: int) -> list[Layout]:
    """Every layout that one move makes of this one, within the GPUs, each once.

    A move adds or removes a replica, changes its role, splits it into two of half the degree, merges two equal ones,
    or gives all replicas of one role another role.
    """
    now = counts_of(layout)
    found: dict[Layout, None] = {}
    for counts in _moves(now, degrees):
        moved = layout_of(counts)
        if moved != layout and moved.gpus <= most_gpus and (moved.decode or moved.mixed):
            found[moved] = None
    return list(found)


def scaled(layout: Layout, factor: int) -> Layout:
    """A layout of `factor` times as many replicas."""
    return layout_of(Counter({key: factor * count for key, count in counts_of(layout).items()}))


def filled(layout: Layout, degrees: Sequence[int], most_gpus: int, bound: Callable[[Layout], float]) -> Layout:
    """The layout with further replicas of its roles, as long as there are GPUs for one that raises the bound.

    Args:
        bound: about the rate that a layout carries.
    """
    while True:
        counts = counts_of(layout)
        more = [layout_of(_with(counts, {(role, degree): 1})) for role in layout.groups for degree in degrees]
        able = [each for each in more if each.gpus <= most_gpus and bound(each) > bound(layout) * _RAISED]
        if not able:
            return layout
        layout = max(able, key=bound)


def counts_of(layout: Layout) -> Counts:
    return Counter({(role, degree): count for role, group in layout.groups.items() for degree, count in group})


def layout_of(counts: Counts) -> Layout:
    """The layout of these replicas. A single mixed one has no others to prefill for, so it is co-located."""
    if counts.total() == 1:
        counts = Counter({(Role.DECODE if role is Role.MIXED else role, degree): 1 for role, degree in +counts})
    by_role = {
        role: replicas_of({degree: count for (of, degree), count in counts.items() if of is role}) for role in Role
    }
    return Layout(by_role[Role.PREFILL], by_role[Role.DECODE], by_role[Role.MIXED])


def _moves(now: Counts, degrees: Sequence[int]) -> Iterator[Counts]:
    present = [key for key, count in now.items() if count]
    for role, degree in present:
        yield _with(now, {(role, degree): -1, (_OTHER[role], degree): 1})
    yield from _resized(now, present, degrees)
    for role, other in _TOGETHER:
        yield _all_in(now, role, other)
    for role, degree in present:
        yield _with(now, {(role, degree): -1})
    for role in dict.fromkeys([*(role for role, _ in present), Role.DECODE, Role.PREFILL]):
        for degree in degrees:
            yield _with(now, {(role, degree): 1})


def _resized(now: Counts, present: Sequence[tuple[Role, int]], degrees: Sequence[int]) -> Iterator[Counts]:
    """Splits and merges, within a role and across roles."""
    for role, degree in present:
        half, double = degree // 2, degree * 2
        if half in degrees and half * 2 == degree:
            yield _with(now, {(role, degree): -1, (role, half): 2})
            yield _with(now, {(role, degree): -1, (Role.PREFILL, half): 1, (Role.DECODE, half): 1})
        if double not in degrees:
            continue
        if now[role, degree] >= 2:
            yield _with(now, {(role, degree): -2, (role, double): 1})
        for other in Role:
            if other is not role and now[other, degree]:
                yield _with(now, {(role, degree): -1, (other, degree): -1, (role, double): 1})
        if now[role, degree] == 1:
            # Takes free GPUs.
            yield _with(now, {(role, degree): -1, (role, double): 1})


def _with(now: Counts, change: dict[tuple[Role, int], int]) -> Counts:
    counts = Counter(now)
    for key, difference in change.items():
        counts[key] += difference
    return +counts


def _all_in(now: Counts, role: Role, other: Role) -> Counts:
    counts: Counts = Counter()
    for (of, degree), count in now.items():
        counts[other if of is role else of, degree] += count
    return counts
