"""What each term of ours is worth where roles can follow the load: the highest rates with one term changed.

    python -m benchmarks.best_layouts.ablation [--only NAME,...] [--seeds 3] [--data FILE]

All start from the even split of four workers. The searches are those of `benchmarks.best_layouts`. The costs are those
that a simulation shows: changes of roles, and the share of the prefills that read their history from another worker.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from pydantic import Field

from ampd.documents import check_writable
from ampd.errors import guarded
from ampd.settings import Settings, parse_settings
from benchmarks import markdown_table
from benchmarks.best_layouts.entries import Entry, settings_named
from benchmarks.best_layouts.search import CRITERIA, Searcher, first_start
from benchmarks.best_layouts.table import ratio
from benchmarks.geometric import geometric_mean
from benchmarks.policies.campaign import Ledger
from benchmarks.policies.contest import Point
from benchmarks.policies.contestants import OURS, OURS_STATIC
from benchmarks.policies.report import ratio_text
from benchmarks.policies.settings import Setting

PROG = "python -m benchmarks.best_layouts.ablation"
_FOUR_WORKERS = "2xTP"

CHANGED = (
    replace(OURS_STATIC, label="fixed roles"),
    replace(OURS, label="binding least-kv", binding="least-kv"),
    replace(OURS, label="sessions stay", moves="never"),
    replace(OURS, label="any session may move", moves="any"),
    replace(OURS, label="no long prefill local while decoding", routing="predictive(least_share=1)"),
    replace(OURS, label="routing always-remote", routing="always-remote"),
    replace(OURS, label="ordering fcfs", ordering="fcfs"),
    replace(OURS, label="slicing whole", slicing="whole"),
)
"""Ours, with one term changed each."""


class AblationSettings(Settings):
    """Search the sustained goodput of ours with one term changed."""

    only: str = Field(_FOUR_WORKERS, description="Only settings whose names contain one of these, comma-separated.")
    seeds: int = Field(3, ge=1, le=100, description="Seeds of arrivals and lengths.")
    precision: float = Field(1.08, gt=1, le=2, description="Factor up to which a highest rate is searched.")
    data: Path | None = Field(None, description="JSON lines of simulations; what it has already is not made again.")


@dataclass(frozen=True)
class Outcome:
    """One contestant in one setting: its rates by seed, and its simulation at the highest rate of rounds."""

    rates: Mapping[str, Sequence[float]]
    at_highest: Sequence[Point]


def outcomes(searcher: Searcher, setting: Setting, seeds: int) -> dict[str, Outcome]:
    """By label, ours first."""
    starts = [first_start(setting)] * seeds
    found: dict[str, Outcome] = {}
    for contestant in (OURS, *CHANGED):
        entry = Entry(contestant, setting)
        rates = [searcher.goodput(entry, seed, start) for seed, start in enumerate(starts)]
        if contestant is OURS:
            # The others begin where ours ends, so that equal rates come out equal.
            starts = [
                {each: rate or start[each] for each, rate in of.items()}
                for start, of in zip(starts, rates, strict=True)
            ]
        highest = [(seed, each["sustained_rounds"]) for seed, each in enumerate(rates) if each["sustained_rounds"]]
        found[contestant.label] = Outcome(
            {criterion: [each[criterion] for each in rates] for criterion in CRITERIA},
            [searcher.point(entry, seed, rate) for seed, rate in highest],
        )
    return found


def table(by_setting: Mapping[str, Mapping[str, Outcome]]) -> str:
    """A row per term: the share of ours in each setting, the mean over the settings, and the costs."""
    rows = []
    for label in (OURS.label, *(each.label for each in CHANGED)):
        row = [label]
        for criterion in CRITERIA:
            shares = [
                ratio(found[label].rates[criterion], found[OURS.label].rates[criterion])
                for found in by_setting.values()
            ]
            means = [share[0] for share in shares if share and share[0]]
            row += [*map(ratio_text, shares), f"{geometric_mean(means):.2f}" if means else "-"]
        points = [point for found in by_setting.values() for point in found[label].at_highest]
        row.append(f"{fmean(point.role_changes for point in points):.1f}" if points else "-")
        row.append(f"{100 * fmean(1 - point.local for point in points):.0f} %" if points else "-")
        rows.append(row)
    heads = ["ours, with"]
    for name in CRITERIA.values():
        heads += [*(f"{setting}, {name}" for setting in by_setting), f"mean, {name}"]
    return markdown_table.table([*heads, "changes of roles", "prefills elsewhere"], rows)


def run(argv: Sequence[str]) -> int:
    """Search setting by setting, and print the table.

    Raises:
        UserError: wrong flags, or a data file of something else.
    """
    options = parse_settings(AblationSettings, argv, PROG)
    check_writable(options.data)
    searcher = Searcher(Ledger(options.data), options.precision, lambda _: None)
    found: dict[str, Mapping[str, Outcome]] = {}
    for setting in settings_named(options.only):
        name = f"{setting.name} {setting.gpu}"
        print(name, file=sys.stderr, flush=True)
        found[name] = outcomes(searcher, setting, options.seeds)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
