"""The tables of the page: ours against the best rival and against the best of our own parts, by setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from benchmarks import markdown_table
from benchmarks.best_layouts.entries import OURS_FROM_EVEN
from benchmarks.best_layouts.search import CRITERIA, PARTS, RIVAL, Outcome
from benchmarks.geometric import geometric_interval, geometric_mean
from benchmarks.policies.report import goodput_text, ratio_text
from benchmarks.policies.settings import Setting
from planner.intervals import mean_interval

Outcomes = Mapping[Setting, Sequence[Outcome]]
"""By setting: an outcome per seed."""
_RECOMMENDED = OURS_FROM_EVEN[0].label


def tables(outcomes: Outcomes) -> str:
    """All tables, in Markdown."""
    parts = ["### Summary", summary_table(outcomes)]
    for criterion, name in CRITERIA.items():
        parts += [f"### Sustained goodput of {name}, sessions per second", setting_table(outcomes, criterion)]
        parts += [f"### The same as a share of the best, by start of ours ({name})", starts_table(outcomes, criterion)]
    return "\n\n".join(parts)


def summary_table(outcomes: Outcomes) -> str:
    """Geometric mean, lowest ratio and count of losses over the settings."""
    rows = []
    for criterion, name in CRITERIA.items():
        for contestant in OURS_FROM_EVEN:
            row = [f"{contestant.label}, {name}"]
            for kind in (RIVAL, PARTS):
                found = (_ratio(each, contestant.label, kind, criterion) for each in outcomes.values())
                ratios = [each[0] for each in found if each]
                below = sum(each < 0.995 for each in ratios)
                row += (
                    [f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", f"{below} of {len(ratios)}"]
                    if ratios
                    else ["-"] * 3
                )
            rows.append(row)
    heads = [f"/ {kind}, {what}" for kind in (RIVAL, PARTS) for what in ("mean", "lowest", "below 1")]
    return markdown_table.table(["ours, from the even split", *heads], rows)


def setting_table(outcomes: Outcomes, criterion: str) -> str:
    """The recommended contestant, against the best rival and the best of our parts."""
    rows = []
    for setting, seeds in outcomes.items():
        mine = mean_interval([each.ours[_RECOMMENDED][criterion] for each in seeds])
        row = [f"{setting.name} {setting.gpu}", str(len(seeds)), goodput_text(mine)]
        for kind in (RIVAL, PARTS):
            values = [each.best[kind][criterion].rate for each in seeds]
            label = seeds[0].best[kind][criterion].entry.label if any(values) else ""
            row += [
                f"{goodput_text(mean_interval(values))} {label}".strip(),
                ratio_text(_ratio(seeds, _RECOMMENDED, kind, criterion)),
            ]
        rows.append(row)
    return markdown_table.table(["setting", "seeds", "ours", RIVAL, "ours / rival", PARTS, "ours / parts"], rows)


def starts_table(outcomes: Outcomes, criterion: str) -> str:
    """Every way in which ours can start, over the best of our parts."""
    rows = [
        [
            f"{setting.name} {setting.gpu}",
            *(ratio_text(_ratio(seeds, each.label, PARTS, criterion)) for each in OURS_FROM_EVEN),
        ]
        for setting, seeds in outcomes.items()
    ]
    return markdown_table.table(["setting", *(each.label for each in OURS_FROM_EVEN)], rows)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float] | None:
    """(ours / theirs, ends of the 95 % interval), seed by seed; None: the other one carries nothing."""
    pairs = list(zip(ours, theirs, strict=True))
    if not sum(theirs):
        return None
    if min(map(min, pairs)) > 0:
        return geometric_interval([mine / other for mine, other in pairs])
    return sum(ours) / sum(theirs), 0.0, inf


def _ratio(seeds: Sequence[Outcome], label: str, kind: str, criterion: str) -> tuple[float, float, float] | None:
    best = [each.best[kind][criterion].rate for each in seeds]
    return ratio([each.ours[label][criterion] for each in seeds], best)
