"""The tables: each way to choose roles against the start, co-located serving and the best static layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import markdown_table
from benchmarks.choice_of_roles.cases import START, WAYS, WRONG_MODELS, Circumstance
from benchmarks.policies.contest import Point

FIGURES = ("rounds", "sessions")
_BELOW = 0.005
"""Shares that differ by less, in the mean over the seeds, count as equal."""


@dataclass(frozen=True)
class Cell:
    """One setting, load and seed.

    Attributes:
        rate: sessions per second.
        ways: name of a way to choose roles -> what it attained.
        static: name of another static layout -> what it attained.
    """

    name: str
    circumstance: Circumstance
    seed: int
    rate: float
    ways: Mapping[str, Point]
    static: Mapping[str, Point]

    def line(self) -> str:
        """Everything in one line, for those who wait."""
        shares = [
            f"{name} {100 * point.rounds:.1f}/{100 * point.sessions:.1f} ({point.role_changes:g})"
            for name, point in {**self.ways, **self.static}.items()
        ]
        words = [self.name, self.circumstance.condition.name, f"x{self.circumstance.load:g}", f"{self.rate:.3g}/s"]
        return f"{' '.join(words)} seed {self.seed}: {'; '.join(shares)}"


Opponent = Callable[[Cell, str], float]
"""(cell, figure) -> the share that another one attained."""


def _start(cell: Cell, figure: str) -> float:
    return _share(cell.ways[START.label], figure)


def _colocated(cell: Cell, figure: str) -> float:
    return _share(cell.static["co-located"], figure)


def _best_static(cell: Cell, figure: str) -> float:
    return max(_start(cell, figure), *(_share(point, figure) for point in cell.static.values()))


OPPONENTS: Mapping[str, Opponent] = {
    "the start": _start,
    "co-located": _colocated,
    "the best static layout": _best_static,
}


def tables(cells: Sequence[Cell]) -> str:
    """All tables, in Markdown."""
    usual = [cell for cell in cells if cell.circumstance.is_usual]
    parts = ["Differences in points of the attained share. A case is a setting at a load, as the mean of its seeds."]
    parts += [summary_table(usual, name, opponent) for name, opponent in OPPONENTS.items()]
    for figure in FIGURES:
        parts += [f"% of the {figure}, mean of the seeds", setting_table(usual, figure)]
    for circumstance in WRONG_MODELS:
        if wrong := [cell for cell in cells if cell.circumstance == circumstance]:
            name = f"the start, {circumstance.condition.name}"
            parts.append(summary_table(wrong, name, _start))
    return "\n\n".join(parts)


def summary_table(cells: Sequence[Cell], name: str, opponent: Opponent) -> str:
    """Each way against an opponent: mean, lowest case, cases below, lowest single run."""
    rows = []
    for way in cells[0].ways:
        row = [way]
        for figure in FIGURES:
            cases = [
                [_share(cell.ways[way], figure) - opponent(cell, figure) for cell in group]
                for group in _groups(cells).values()
            ]
            means = [_mean(runs) for runs in cases]
            below = f"{sum(mean < -_BELOW for mean in means)} of {len(means)}"
            row += [_points(_mean(means)), _points(min(means)), below, _points(min(map(min, cases)))]
        rows.append(row)
    heads = [f"{figure}, {what}" for figure in FIGURES for what in ("mean", "lowest case", "below", "lowest run")]
    return markdown_table.table([f"against {name}", *heads], rows)


def setting_table(cells: Sequence[Cell], figure: str) -> str:
    """A row for each case: what each way and each static layout attained."""
    rows = []
    for (name, load), group in _groups(cells).items():
        row = [name, f"{load:g} ({group[0].rate:.3g}/s)"]
        row += [f"{100 * _mean([_share(cell.ways[way.label], figure) for cell in group]):.1f}" for way in WAYS]
        row.append(f"{100 * _mean([_colocated(cell, figure) for cell in group]):.1f}")
        others = {
            layout: _mean([_share(cell.static[layout], figure) for cell in group])
            for layout in group[0].static
            if layout != "co-located"
        }
        best = max(others, key=others.__getitem__, default="")
        row.append(f"{100 * others[best]:.1f} {best}" if best else "-")
        rows.append(row)
    heads = ["setting", "load", *(way.label for way in WAYS), "co-located", "best other split"]
    return markdown_table.table(heads, rows)


def _groups(cells: Sequence[Cell]) -> dict[tuple[str, float], list[Cell]]:
    """The seeds of each case, by setting and load."""
    groups: dict[tuple[str, float], list[Cell]] = {}
    loads = sorted({cell.circumstance.load for cell in cells})
    for name in dict.fromkeys(cell.name for cell in cells):
        for load in loads:
            if group := [cell for cell in cells if (cell.name, cell.circumstance.load) == (name, load)]:
                groups[name, load] = group
    return groups


def _share(point: Point, figure: str) -> float:
    return float(getattr(point, figure))


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
