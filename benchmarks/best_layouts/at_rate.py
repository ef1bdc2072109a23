"""The attainment of a setting's entries at one rate, under a load of any length, and in unusual conditions.

Sessions of some traces last longer than the arrivals of the main comparison, so that memory is not full there.

    python -m benchmarks.best_layouts.at_rate --only "coding-agents 2xTP2" --rate 0.1 --seconds 1500

    ... --only "8b tau-bench-airline 2xTP1" --rate 27 --seconds 100 --belief 1.3

All sessions count. The entries are ours from the even split and co-located, on both kinds of engines, and the rivals.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from pydantic import Field

from ampd.errors import UserError, guarded
from ampd.settings import Settings, parse_settings
from benchmarks.best_layouts.entries import Entry, our_parts, ours, rivals, settings_named
from benchmarks.policies.contest import Condition, reached, run
from benchmarks.policies.settings import Setting

PROG = "python -m benchmarks.best_layouts.at_rate"


class AtRateSettings(Settings):
    """Simulate the entries of one setting at one rate."""

    only: str = Field(description="A part of the setting's name; the first one that has it is taken.")
    rate: float = Field(gt=0, description="Sessions per second.")
    seconds: float = Field(1500.0, gt=0, description="Length of the arrivals.")
    seeds: int = Field(2, ge=1, le=100, description="Seeds of arrivals, from 1 on.")
    entries: str = Field("", description="Only entries with one of these labels, separated by semicolons.")
    belief: str = Field(
        "1",
        pattern=r"(kept-)?(random|\d+(\.\d+)?)",
        description="What the policies take the model's times for: a factor, or `random` for 0.7 to 1.3 each for "
        "prefill, decode and transfer. Workers correct it, unless `kept-` stands before it.",
    )
    state_delay_s: float = Field(0.0, ge=0, description="Age of the state that the policies see.")
    coordinators: int = Field(1, ge=1, le=100, description="Coordinators, each of which knows its own decisions first.")

    @property
    def condition(self) -> Condition:
        return Condition("", belief=self.belief, state_delay_s=self.state_delay_s, coordinators=self.coordinators)


def entries_of(setting: Setting, labels: str) -> list[Entry]:
    """The entries with these labels; "": all.

    Raises:
        UserError: no entry is called so.
    """
    every = [entry for part in (ours, our_parts, rivals) for entry in part(setting)]
    by_label = {entry.label: entry for entry in every}
    wanted = [label.strip() for label in labels.split(";")] if labels else list(by_label)
    if unknown := [label for label in wanted if label not in by_label]:
        raise UserError(f"--entries: no {unknown[0]!r}; there are {'; '.join(by_label)}")
    return [by_label[label] for label in wanted]


def row(entry: Entry, options: AtRateSettings) -> str:
    """The means of the seeds as a row of the table."""
    seeds = range(1, options.seeds + 1)
    runs = [run(entry.setting, entry.contestant, options.rate, seed, options.condition) for seed in seeds]
    shares = [reached(entry.setting, *each) for each in runs]
    each = ", ".join(f"{100 * attained.rounds:.1f} / {100 * attained.sessions:.1f}" for attained in shares)
    rounds, sessions = fmean(attained.rounds for attained in shares), fmean(attained.sessions for attained in shares)
    return f"| {entry.label} | {100 * rounds:.1f} / {100 * sessions:.1f} | {each} |"


def main(argv: Sequence[str]) -> int:
    """Print the table, row by row."""
    options = parse_settings(AtRateSettings, argv, PROG)
    setting = replace(settings_named(options.only)[0], duration_s=options.seconds)
    entries = entries_of(setting, options.entries)
    print("| entry | rounds / sessions, mean, % | by seed |\n| --- | --- | --- |", flush=True)
    for entry in entries:
        print(row(entry, options), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
