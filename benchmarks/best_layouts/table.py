"""The tables: ours against the best rival and against the best of our own parts, by setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from statistics import fmean

from benchmarks import markdown_table
from benchmarks.best_layouts.entries import OURS_FROM_EVEN, Engine, on
from benchmarks.best_layouts.limit import limit_text, most_sessions_per_s
from benchmarks.best_layouts.search import CRITERIA, PARTS, RIVAL, Outcome
from benchmarks.geometric import geometric_interval, geometric_mean
from benchmarks.intervals import mean_interval
from benchmarks.policies.report import goodput_text, ratio_text
from benchmarks.policies.settings import Setting

Outcomes = Mapping[Setting, Sequence[Outcome]]
"""By setting: an outcome per seed."""
_PAUSES, _ALL = (Engine.PAUSES,), tuple(Engine)
_EQUAL = 0.995
"""Ratios from here on do not count as losses, because they are shown as 1.00."""


def tables(outcomes: Outcomes) -> dict[str, str]:
    """All tables, in Markdown, by title. Goodput is in sessions per second."""
    found = {"summary": summary_table(outcomes)}
    for criterion, name in CRITERIA.items():
        for engine in Engine:
            found[f"goodput of {name}, engine {engine}"] = setting_table(outcomes, criterion, engine)
    for criterion, name in CRITERIA.items():
        found[f"roles over the best of our parts, {name}"] = roles_table(outcomes, criterion)
    return found


def summary_table(outcomes: Outcomes) -> str:
    """Geometric mean, lowest ratio and count of losses over the settings."""
    rows = []
    for criterion, name in CRITERIA.items():
        for engine in Engine:
            for contestant in on(engine, OURS_FROM_EVEN):
                row = [f"{contestant.label}, {name}"]
                for kind, engines in _compared_with(engine):
                    found = (_ratio(each, contestant.label, kind, engines, criterion) for each in outcomes.values())
                    row += _summary([each[0] for each in found if each])
                rows.append(row)
        row = [f"limit, {name}"]
        for kind, engines in _compared_with(Engine.SHARES):
            found = (_limit_ratio(setting, each, kind, engines, criterion) for setting, each in outcomes.items())
            row += _summary([each[0] for each in found if each])
        rows.append(row)
    names = ("best rival that pauses", "best of all rivals", "best of our parts")
    heads = [f"/ {name}, {what}" for name in names for what in ("mean", "lowest", "below 1")]
    return markdown_table.table(["ours, from the even split", *heads], rows)


def _compared_with(engine: Engine) -> Iterator[tuple[str, Sequence[Engine]]]:
    yield RIVAL, _PAUSES
    yield RIVAL, _ALL
    yield PARTS, _PAUSES if engine is Engine.PAUSES else _ALL


def _summary(ratios: Sequence[float]) -> list[str]:
    if not ratios:
        return ["-"] * 3
    below = sum(each < _EQUAL for each in ratios)
    return [f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", f"{below} of {len(ratios)}"]


def setting_table(outcomes: Outcomes, criterion: str, engine: Engine) -> str:
    """Ours, against the best rivals and the best of our parts."""
    recommended = on(engine, OURS_FROM_EVEN)[0].label
    rows = []
    for setting, seeds in outcomes.items():
        mine = mean_interval([each.ours[recommended][criterion] for each in seeds])
        limit = limit_text(_limits(setting, seeds))
        row = [f"{setting.name} {setting.gpu}", str(len(seeds)), limit, goodput_text(mine)]
        for kind, engines in _compared_with(engine):
            label, values = _best(seeds, kind, engines, criterion)
            row.append(f"{goodput_text(mean_interval(values))} {label}".strip())
            row.append(ratio_text(_ratio(seeds, recommended, kind, engines, criterion)))
        rows.append(row)
    heads = ["setting", "seeds", "limit", "ours"]
    for name in ("best rival that pauses", "best of all rivals", "best of our parts"):
        heads += [name, "ours over it"]
    return markdown_table.table(heads, rows)


def roles_table(outcomes: Outcomes, criterion: str) -> str:
    """Every way in which ours can start, over the best of our parts."""
    rows = []
    for setting, seeds in outcomes.items():
        row = [f"{setting.name} {setting.gpu}"]
        for engine in Engine:
            *_, (kind, engines) = _compared_with(engine)
            for each in on(engine, OURS_FROM_EVEN):
                row.append(ratio_text(_ratio(seeds, each.label, kind, engines, criterion)))
        rows.append(row)
    return markdown_table.table(
        ["setting", *(each.label for engine in Engine for each in on(engine, OURS_FROM_EVEN))], rows
    )


def _best(seeds: Sequence[Outcome], kind: str, engines: Sequence[Engine], criterion: str) -> tuple[str, list[float]]:
    """The best entry of some engines by its mean, with its rate of each seed."""
    found: dict[str, list[float]] = {}
    for engine in engines:
        values = [each.best[kind, engine][criterion].rate for each in seeds]
        found[seeds[0].best[kind, engine][criterion].entry.label if any(values) else ""] = values
    return max(found.items(), key=lambda item: fmean(item[1]))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float] | None:
    """(ours / theirs, ends of the 95 % interval), seed by seed; None: the other one carries nothing."""
    pairs = list(zip(ours, theirs, strict=True))
    if not sum(theirs):
        return None
    if min(map(min, pairs)) > 0:
        return geometric_interval([mine / other for mine, other in pairs])
    return sum(ours) / sum(theirs), 0.0, inf


def _ratio(
    seeds: Sequence[Outcome], label: str, kind: str, engines: Sequence[Engine], criterion: str
) -> tuple[float, float, float] | None:
    _, best = _best(seeds, kind, engines, criterion)
    return ratio([each.ours[label][criterion] for each in seeds], best)


def _limit_ratio(
    setting: Setting, seeds: Sequence[Outcome], kind: str, engines: Sequence[Engine], criterion: str
) -> tuple[float, float, float] | None:
    limits = [limit for limit in _limits(setting, seeds) if limit is not None]
    _, best = _best(seeds, kind, engines, criterion)
    return ratio(limits, best) if limits else None


def _limits(setting: Setting, seeds: Sequence[Outcome]) -> list[float | None]:
    return [most_sessions_per_s(setting, seed) for seed in range(len(seeds))]
