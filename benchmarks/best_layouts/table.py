"""The tables: ours against the best rival and against the best of our own parts, by setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from benchmarks import markdown_table
from benchmarks.best_layouts.entries import OURS_FROM_EVEN
from benchmarks.best_layouts.limit import limit_text, most_sessions_per_s
from benchmarks.best_layouts.search import CRITERIA, PARTS, RIVAL, Outcome
from benchmarks.geometric import geometric_interval, geometric_mean
from benchmarks.intervals import mean_interval
from benchmarks.policies.report import goodput_text, ratio_text
from benchmarks.policies.settings import Setting

Outcomes = Mapping[Setting, Sequence[Outcome]]
"""By setting: an outcome per seed."""
_EQUAL = 0.995
"""Ratios from here on do not count as losses, because they are shown as 1.00."""


def tables(outcomes: Outcomes) -> dict[str, str]:
    """All tables, in Markdown, by title. Goodput is in sessions per second."""
    found = {"summary": summary_table(outcomes)}
    for criterion, name in CRITERIA.items():
        found[f"goodput of {name}"] = setting_table(outcomes, criterion)
    for criterion, name in CRITERIA.items():
        found[f"roles over the best of our parts, {name}"] = roles_table(outcomes, criterion)
    return found


_OTHERS = {RIVAL: "best rival", PARTS: "best of our parts"}


def summary_table(outcomes: Outcomes) -> str:
    """Geometric mean, lowest ratio and count of losses over the settings."""
    rows = []
    for criterion, name in CRITERIA.items():
        for contestant in OURS_FROM_EVEN:
            row = [f"{contestant.label}, {name}"]
            for kind in _OTHERS:
                found = (_ratio(each, contestant.label, kind, criterion) for each in outcomes.values())
                row += _summary([each[0] for each in found if each])
            rows.append(row)
        row = [f"limit, {name}"]
        for kind in _OTHERS:
            found = (_limit_ratio(setting, each, kind, criterion) for setting, each in outcomes.items())
            row += _summary([each[0] for each in found if each])
        rows.append(row)
    heads = [f"/ {name}, {what}" for name in _OTHERS.values() for what in ("mean", "lowest", "below 1")]
    return markdown_table.table(["ours, from the even split", *heads], rows)


def _summary(ratios: Sequence[float]) -> list[str]:
    if not ratios:
        return ["-"] * 3
    below = sum(each < _EQUAL for each in ratios)
    return [f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", f"{below} of {len(ratios)}"]


def setting_table(outcomes: Outcomes, criterion: str) -> str:
    """Ours, against the best rival and the best of our parts."""
    recommended = OURS_FROM_EVEN[0].label
    rows = []
    for setting, seeds in outcomes.items():
        mine = mean_interval([each.ours[recommended][criterion] for each in seeds])
        limit = limit_text(_limits(setting, seeds))
        row = [f"{setting.name} {setting.gpu}", str(len(seeds)), limit, goodput_text(mine)]
        for kind in _OTHERS:
            label, values = _best(seeds, kind, criterion)
            row.append(f"{goodput_text(mean_interval(values))} {label}".strip())
            row.append(ratio_text(_ratio(seeds, recommended, kind, criterion)))
        rows.append(row)
    heads = ["setting", "seeds", "limit", "ours"]
    for name in _OTHERS.values():
        heads += [name, "ours over it"]
    return markdown_table.table(heads, rows)


def roles_table(outcomes: Outcomes, criterion: str) -> str:
    """Every way in which ours can start, over the best of our parts."""
    rows = []
    for setting, seeds in outcomes.items():
        ratios = [ratio_text(_ratio(seeds, each.label, PARTS, criterion)) for each in OURS_FROM_EVEN]
        rows.append([f"{setting.name} {setting.gpu}", *ratios])
    return markdown_table.table(["setting", *(each.label for each in OURS_FROM_EVEN)], rows)


def _best(seeds: Sequence[Outcome], kind: str, criterion: str) -> tuple[str, list[float]]:
    """The best entry, with its rate of each seed."""
    values = [each.best[kind][criterion].rate for each in seeds]
    return seeds[0].best[kind][criterion].entry.label if any(values) else "", values


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float] | None:
    """(ours / theirs, ends of the 95 % interval), seed by seed; None: the other one carries nothing."""
    pairs = list(zip(ours, theirs, strict=True))
    if not sum(theirs):
        return None
    if min(map(min, pairs)) > 0:
        return geometric_interval([mine / other for mine, other in pairs])
    return sum(ours) / sum(theirs), 0.0, inf


def _ratio(seeds: Sequence[Outcome], label: str, kind: str, criterion: str) -> tuple[float, float, float] | None:
    _, best = _best(seeds, kind, criterion)
    return ratio([each.ours[label][criterion] for each in seeds], best)


def _limit_ratio(
    setting: Setting, seeds: Sequence[Outcome], kind: str, criterion: str
) -> tuple[float, float, float] | None:
    limits = [limit for limit in _limits(setting, seeds) if limit is not None]
    _, best = _best(seeds, kind, criterion)
    return ratio(limits, best) if limits else None


def _limits(setting: Setting, seeds: Sequence[Outcome]) -> list[float | None]:
    return [most_sessions_per_s(setting, seed) for seed in range(len(seeds))]
