"""What each term of ours costs: CPU time of a simulated round with the term changed, over that of ours.

    python -m benchmarks.best_layouts.term_cost --only "toolbench 2xTP2" --rate 9 --seconds 30

A simulated round is nearly all decisions: its binding, its routing, the order of its queue and its slices. So the
difference is the cost of the term, and of what changes because other decisions are made. Simulations run in turns, on
one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from pydantic import Field

from ampd.compiled import state
from ampd.errors import guarded
from ampd.settings import Settings, parse_settings
from benchmarks import markdown_table
from benchmarks.best_layouts.ablation import CHANGED
from benchmarks.best_layouts.entries import settings_named
from benchmarks.circumstances import circumstances, in_words
from benchmarks.policies.contest import Contestant, run
from benchmarks.policies.contestants import OURS
from benchmarks.policies.settings import Setting

PROG = "python -m benchmarks.best_layouts.term_cost"

CONTESTANTS = (OURS, *CHANGED)


class TermCostSettings(Settings):
    """Measure the CPU time of a simulated round, with one term of ours changed each."""

    only: str = Field(description="A part of the setting's name; the first one that has it is taken.")
    rate: float = Field(gt=0, description="Sessions per second.")
    seconds: float = Field(30.0, gt=0, description="Length of the arrivals.")
    repeats: int = Field(3, ge=1, le=100, description="Simulations of each, one seed each.")


def cpu_us_per_round(setting: Setting, contestant: Contestant, rate: float, seed: int) -> float:
    """Of one simulation, its start included."""
    start_s = time.process_time()
    _, done = run(setting, contestant, rate, seed)
    return (time.process_time() - start_s) / len(done.rounds) * 1e6


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    options = parse_settings(TermCostSettings, argv, PROG)
    setting = replace(settings_named(options.only)[0], duration_s=options.seconds)
    print(f"{setting.name} {setting.gpu}, {in_words(circumstances())}, {state()}", file=sys.stderr)
    found = [
        [cpu_us_per_round(setting, contestant, options.rate, seed) for contestant in CONTESTANTS]
        for seed in range(options.repeats)
    ]
    rows = []
    for contestant, *times_us in zip(CONTESTANTS, *found, strict=True):
        shares = [time_us / ours_us for time_us, (ours_us, *_) in zip(times_us, found, strict=True)]
        rows.append([contestant.label, f"{median(times_us):.0f}", f"{median(shares):.2f}"])
    print(markdown_table.table(["ours, with", "CPU time of a round, us", "over ours"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
