"""`python -m benchmarks.best_layouts`: ours from an even split, against the best that other layouts and rivals do."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from ampd.documents import check_writable
from ampd.errors import guarded
from ampd.settings import Settings, parse_settings
from benchmarks import markdown_table, result_files
from benchmarks.best_layouts.entries import settings_named
from benchmarks.best_layouts.named import named_rivals
from benchmarks.best_layouts.search import Outcome, Searcher, first_outcome, further_outcome
from benchmarks.best_layouts.table import tables
from benchmarks.policies.campaign import Ledger
from benchmarks.policies.settings import Setting

PROG = "python -m benchmarks.best_layouts"
_RESULTS = "best layouts"
_QUICK_S = 30.0


class BestLayoutsSettings(Settings):
    """Search the sustained goodput of ours from an even split, and of rivals and our parts on their best layouts."""

    only: str | None = Field(None, description="Only settings whose names contain one of these, comma-separated.")
    seeds: int = Field(3, ge=1, le=100, description="Seeds of arrivals and lengths; the first one chooses layouts.")
    precision: float = Field(1.05, gt=1, le=2, description="Factor up to which a highest rate is searched.")
    quick: bool = Field(False, description="One seed, 30 s of arrivals, precision 1.15: minutes, and no result.")
    rivals_of: Path | None = Field(
        None,
        description="Folder with tables of an earlier search. Only those rivals are tried that these name as the "
        "best ones of any setting, on every layout.",
    )
    data: Path | None = Field(None, description="JSON lines of simulations; what it has already is not made again.")
    write: Path | None = Field(None, description="Folder for the tables as CSV files; default: print them.")


def run(argv: Sequence[str]) -> int:
    """Search setting by setting, all of them with the first seed before the next seed, with tables after each.

    Raises:
        UserError: wrong flags, no such setting, a folder that does not exist, a data file of something else.
    """
    options = parse_settings(BestLayoutsSettings, argv, PROG)
    check_writable(options.data)
    result_files.check_folder(options.write)
    settings = _chosen(options)
    named = {setting: named_rivals(options.rivals_of, setting) for setting in settings} if options.rivals_of else {}
    searcher = Searcher(Ledger(options.data), 1.15 if options.quick else options.precision, _report)
    outcomes: dict[Setting, list[Outcome]] = {}
    for seed in range(1 if options.quick else options.seeds):
        for setting in settings:
            _report(f"{setting.name} {setting.gpu}, seed {seed}")
            if seed:
                outcomes[setting].append(further_outcome(searcher, setting, seed, outcomes[setting][0]))
            else:
                outcomes[setting] = [first_outcome(searcher, setting, named.get(setting))]
            if options.write:
                result_files.write(options.write, _RESULTS, tables(outcomes), shlex.join([*PROG.split(), *argv]))
    if not options.write:
        print(markdown_table.titled(tables(outcomes)))
    return 0


def _chosen(options: BestLayoutsSettings) -> list[Setting]:
    chosen = settings_named(options.only)
    return [replace(each, duration_s=_QUICK_S) for each in chosen] if options.quick else chosen


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
