"""Ours with passes that prefill and decode, from an even split, against the rivals that have such passes.

    AMPD_COMPILED=1 python -m benchmarks.best_layouts.shared_passes [--only NAME,...] [--seeds 3] [--data FILE]

Each entry's highest sustained rates are searched with every seed. The rivals' workers are all alike, so they have one
layout. A ratio compares ours with the rival of the highest mean, seed by seed, and has a 95 % interval. `--data` keeps
the simulations, and a run that was stopped goes on there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from pydantic import Field

from ampd.documents import check_writable
from ampd.errors import guarded
from ampd.settings import Settings, parse_settings
from benchmarks import markdown_table
from benchmarks.best_layouts.entries import OURS_FROM_EVEN, Entry, settings_named
from benchmarks.best_layouts.search import CRITERIA, Searcher
from benchmarks.best_layouts.table import ratio
from benchmarks.geometric import geometric_mean
from benchmarks.policies.campaign import Ledger
from benchmarks.policies.contest import Contestant
from benchmarks.policies.contestants import ALL
from benchmarks.policies.report import ratio_text
from benchmarks.policies.settings import Setting

PROG = "python -m benchmarks.best_layouts.shared_passes"
_SLICING = "slack(mixes=true)"
_RIVALS = ("dynaserve", "co-located mixed passes", "duetserve")
_START = 5.0
"""Sessions per second at which the first search begins. It may be far off."""

Rates = Mapping[str, float]
"""Highest rates by criterion."""


class SharedPassesSettings(Settings):
    """Search the sustained goodput of ours and of rivals whose passes prefill and decode."""

    only: str | None = Field(None, description="Only settings whose names contain one of these, comma-separated.")
    seeds: int = Field(3, ge=1, le=100, description="Seeds of arrivals and lengths.")
    precision: float = Field(1.08, gt=1, le=2, description="Factor up to which a highest rate is searched.")
    data: Path | None = Field(None, description="JSON lines of simulations; what it has already is not made again.")


def ours() -> list[Contestant]:
    """Ours with each way to choose roles."""
    return [replace(each, label=f"{each.label}, shared passes", slicing=_SLICING) for each in OURS_FROM_EVEN]


def rivals() -> list[Contestant]:
    """The rivals that prefill and decode in one pass, or beside each other on the GPU."""
    return [each for each in ALL if each.label in _RIVALS]


def rates_of(searcher: Searcher, setting: Setting, seeds: int) -> dict[str, list[Rates]]:
    """The rates of every seed, by entry."""
    contestants, start = [*rivals(), *ours()], dict.fromkeys(CRITERIA, _START)
    found: dict[str, list[Rates]] = {each.label: [] for each in contestants}
    for seed in range(seeds):
        for contestant in contestants:
            rates = searcher.goodput(Entry(contestant, setting), seed, start)
            found[contestant.label].append(rates)
            # The next search begins near a rate that was found, so that it takes few simulations.
            start = {criterion: rate or start[criterion] for criterion, rate in rates.items()}
    return found


def table(rows: Mapping[str, Mapping[str, Sequence[Rates]]]) -> str:
    """Mean rates, ratios to the best rival with their intervals, and the ratios' means over the settings."""
    labels = [each.label for each in (*rivals(), *ours())]
    head = ["setting", "criterion", *labels, *(f"{each.label} / best rival" for each in ours())]
    lines: list[list[str]] = []
    ratios: dict[tuple[str, str], list[float]] = {}
    for name, by_label in rows.items():
        for criterion, text in CRITERIA.items():
            rates = {label: [each[criterion] for each in by_label[label]] for label in labels}
            best = max((rates[each.label] for each in rivals()), key=fmean)
            row = [ratio(rates[each.label], best) for each in ours()]
            for each, interval in zip(ours(), row, strict=True):
                if interval:
                    ratios.setdefault((each.label, text), []).append(interval[0])
            lines.append([name, text, *(f"{fmean(rates[label]):.3g}" for label in labels), *map(ratio_text, row)])
    summary = [
        f"{label}, {text}: mean {geometric_mean(each):.2f}, lowest {min(each):.2f}, below 1 in "
        f"{sum(value < 0.995 for value in each)} of {len(each)}"
        for (label, text), each in ratios.items()
    ]
    return "\n".join([markdown_table.table(head, lines), "", *summary])


def run(argv: Sequence[str]) -> int:
    """Search setting by setting, and print the table.

    Raises:
        UserError: wrong flags, or a data file of something else.
    """
    options = parse_settings(SharedPassesSettings, argv, PROG)
    check_writable(options.data)
    searcher = Searcher(Ledger(options.data), options.precision, lambda _: None)
    rows: dict[str, Mapping[str, Sequence[Rates]]] = {}
    for setting in settings_named(options.only):
        name = f"{setting.name} {setting.gpu}"
        print(name, file=sys.stderr, flush=True)
        rows[name] = rates_of(searcher, setting, options.seeds)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
