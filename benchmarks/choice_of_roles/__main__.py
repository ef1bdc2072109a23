"""Ways to choose the workers' roles, from an even split, at fixed rates.

    python -m benchmarks.choice_of_roles --data roles.jsonl --write docs/policies-history.md

The rates are 0.85, 1 and 1.15 times what the even split carries, which a search with a seed of its own finds. All
entries serve the same sessions with the same arrivals, and all sessions count, those of the start included.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from ampd.documents import check_writable
from ampd.errors import UserError, guarded
from ampd.settings import Settings, parse_settings
from benchmarks.best_layouts.entries import Entry
from benchmarks.choice_of_roles.cases import CASES, LOADS, START, WRONG_MODELS, Case, Circumstance, static_layouts, ways
from benchmarks.choice_of_roles.table import Cell, tables
from benchmarks.policies.campaign import Ledger, Task
from benchmarks.policies.contest import TARGET, USUAL, Condition, Found, Point, fields_of, measure, run
from benchmarks.policies.report import check_markers, put_between_markers
from benchmarks.rate_search import RateSearch

PROG = "python -m benchmarks.choice_of_roles"
_MARKER = "choice of roles"
_SEARCH_SEED = 100
"""Of the search for the rates."""
_PRECISION = 1.1


class ChoiceOfRolesSettings(Settings):
    """Compare ways to choose roles at fixed rates."""

    only: str = Field("", description="Only settings whose names contain one of these, separated by commas.")
    seeds: int = Field(3, ge=1, le=100, description="Seeds of arrivals and lengths.")
    first_seed: int = Field(101, ge=0, description="The first one. Work on a policy takes others than 101.")
    loads: str = Field("1,1.15,0.85", description="Loads, as multiples of what the even split carries.")
    wrong_models: bool = Field(True, description="Also with times that are wrong by 30 %.")
    data: Path | None = Field(None, description="JSON lines of simulations; what it has already is not made again.")
    again: str = Field("", description="Ways and layouts whose simulations are made again, separated by semicolons.")
    write: Path | None = Field(None, description="Document whose marked part is replaced; default: print the tables.")


@dataclass(frozen=True)
class Simulator:
    """Simulates what the ledger does not have yet."""

    ledger: Ledger

    def capacity(self, case: Case) -> float:
        """The highest rate of sessions whose rounds the even split sustains."""
        entry = Entry(START, case.setting)
        search = RateSearch(lambda rate: self.point(entry, _SEARCH_SEED, rate), _PRECISION, case.near / 100)
        return search.highest(TARGET, "sustained_rounds", case.near)

    def point(self, entry: Entry, seed: int, rate: float, condition: Condition = USUAL) -> Point:
        """The figures of one simulation."""
        task = Task(entry.setting, entry.contestant, seed, condition, (rate,))
        found = self.ledger.found(task)
        if found is None:
            begin_s = time.perf_counter()
            point = measure(entry.setting, *run(entry.setting, entry.contestant, rate, seed, condition))
            # A run that goes on reads rounded figures, so this one uses the same.
            found = Found({}, {rate: Point(**fields_of(point))})
            self.ledger.keep(task, found, time.perf_counter() - begin_s)
        return found.points[rate]

    def cell(self, case: Case, circumstance: Circumstance, seed: int) -> Cell:
        """All entries of one setting, load and seed."""
        rate = self.capacity(case) * circumstance.load
        by_way, by_layout = (
            {name: self.point(entry, seed, rate, circumstance.condition) for name, entry in entries.items()}
            for entries in (ways(case, circumstance), static_layouts(case, circumstance))
        )
        return Cell(case.name, circumstance, seed, rate, by_way, by_layout)


def cells_of(
    cases: Sequence[Case], circumstances: Sequence[Circumstance], seeds: Sequence[int], simulator: Simulator
) -> Iterator[Cell]:
    """All settings with the first seed come first, so that a run that is stopped has seen them all."""
    for seed in seeds:
        for circumstance in circumstances:
            for case in cases:
                cell = simulator.cell(case, circumstance, seed)
                print(cell.line(), file=sys.stderr, flush=True)
                yield cell


def compare(argv: Sequence[str]) -> int:
    """Simulate, and write or print the tables.

    Raises:
        UserError: wrong flags, no such setting or load, a document without markers, a data file of something else.
    """
    options = parse_settings(ChoiceOfRolesSettings, argv, PROG)
    check_writable(options.data, options.write)
    if options.write:
        check_markers(options.write, [_MARKER])
    parts = [part.strip() for part in options.only.split(",")]
    cases = [each for each in CASES if any(part in each.name for part in parts)]
    if not cases:
        raise UserError(f"--only: no setting's name contains {options.only!r}")
    again = frozenset(label.strip() for label in options.again.split(";"))
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    simulator = Simulator(Ledger(options.data, again))
    circumstances = [*_loads(options.loads), *(WRONG_MODELS if options.wrong_models else ())]
    text = tables(list(cells_of(cases, circumstances, seeds, simulator)))
    if options.write:
        put_between_markers(options.write, _MARKER, text)
    else:
        print(text)
    return 0


def _loads(text: str) -> list[Circumstance]:
    known = {f"{each.load:g}": each for each in LOADS}
    for part in text.split(","):
        if part.strip() not in known:
            raise UserError(f"--loads: {part.strip()!r} is none of {', '.join(known)}")
    return [known[part.strip()] for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(guarded(lambda: compare(sys.argv[1:])))
