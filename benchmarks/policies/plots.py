"""The page of plots: attainment over rate in every setting, and geometric means over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ampd.reports.page import FULL_CARD_WIDTH, HALF_CARD, TARGET_COLOUR, Section, legend_above, svg, write_page
from benchmarks.geometric import geometric_mean
from benchmarks.policies.contest import TARGET, Contestant
from benchmarks.policies.contestants import ALWAYS_REMOTE, AMPD, COLOCATED, OURS
from benchmarks.policies.report import TITLES
from benchmarks.policies.settings import Setting
from benchmarks.policies.standings import Groups, Standings
from planner.layout.trial import IN_TIME, TIME_FACTOR

_COLOURS = {
    "ours": "#2f6fde",
    "best rival": "#c62f3c",
    "ampd": "#e07b39",
    "always-remote": "#7b4fc9",
    "co-located": "#1f9d78",
}
_FLOOR = 0.01
"""Where a contestant carries nothing it counts as this share of ours, for a geometric mean needs something."""


def write_plots(path: Path, standings: Standings, groups: Groups) -> None:
    """Write the page. Raises `RunError` if the file cannot be written."""
    everything = list(dict.fromkeys(setting for settings in groups.values() for setting in settings))
    sections = [
        *(_bars(standings, everything, criterion) for criterion in TITLES),
        *(section for criterion in TITLES for section in _multiples(standings, everything, criterion)),
    ]
    lead = (
        f"Simulated, not measured. Goodput: the highest session rate at which {TARGET:.0%} of the rounds (or sessions) "
        f"meet their TTFT and ITL targets; sustained: and {IN_TIME:.0%} of the sessions end within {TIME_FACTOR:g} "
        f"times the time that they would take with every round just at its targets. {_seeds(standings.seeds)}. "
        "`ours` is AMPD with its default policies; `ampd` is Algorithm 1 of the paper."
    )
    write_page(path, "Policies compared", lead, sections)


def _seeds(most: int) -> str:
    return "One seed" if most == 1 else f"Up to {most} seeds"


def relative(standings: Standings, settings: Sequence[Setting], contestant: Contestant, criterion: str) -> float | None:
    """Geometric mean of a contestant's goodput as a share of ours, over the settings where ours carries something."""
    shares = []
    for setting in settings:
        mine, theirs = (standings.goodput(setting, each, criterion) for each in (OURS, contestant))
        if mine and theirs and mine.mean > 0:
            shares.append(max(theirs.mean / mine.mean, _FLOOR))
    return geometric_mean(shares) if shares else None


def _bars(standings: Standings, settings: Sequence[Setting], criterion: str) -> Section:
    shares = {
        contestant.label: relative(standings, settings, contestant, criterion) for contestant in standings.contestants
    }
    ordered = sorted(((share, label) for label, share in shares.items() if share is not None))

    def draw(axes: Any) -> None:
        colours = ["#2f6fde" if label == OURS.label else "#9aa3b2" for _, label in ordered]
        axes.barh([label for _, label in ordered], [share for share, _ in ordered], color=colours)
        for row, (share, _) in enumerate(ordered):
            axes.text(share, row, f" {share:.2f}", va="center", fontsize=8)
        axes.set_xlabel(f"{TITLES[criterion]} over that of ours, geometric mean")
        axes.grid(axis="y", visible=False)

    return Section(
        f"{TITLES[criterion].capitalize()}, all settings",
        text=[f"Settings in which a contestant carries nothing count as {_FLOOR:.0%} of ours."],
        svg=svg(draw, (FULL_CARD_WIDTH, 0.6 + 0.24 * max(len(ordered), 4))),
    )


def _multiples(standings: Standings, settings: Sequence[Setting], criterion: str) -> Iterator[Section]:
    for setting in settings:
        lines = _lines(standings, setting, criterion)
        yield Section(
            f"{setting.name}: {TITLES[criterion]}",
            svg=svg(partial(_draw, lines=lines, criterion=criterion), HALF_CARD),
            is_half=True,
        )


def _lines(standings: Standings, setting: Setting, criterion: str) -> dict[str, tuple[str, list[tuple[float, float]]]]:
    """Name -> (label, (rate, attainment of the first seed) in order)."""
    best = standings.best(setting, standings.rivals, criterion)
    chosen = {"ours": OURS, "best rival": best, "ampd": AMPD, "always-remote": ALWAYS_REMOTE, "co-located": COLOCATED}
    lines = {}
    for name, each in chosen.items():
        if each is None or (name != "best rival" and each == best):
            continue
        points = standings.points(setting, each)
        line = [(rate, getattr(point, criterion)) for rate, point in points.items()]
        if line:
            lines[name] = (f"best rival: {each.label}" if name == "best rival" else name, line)
    return lines


def _draw(axes: Any, lines: dict[str, tuple[str, list[tuple[float, float]]]], criterion: str) -> None:
    for name, (label, line) in lines.items():
        rates, shares = zip(*line, strict=True)
        axes.plot(rates, shares, ".-", color=_COLOURS[name], linewidth=1.4, markersize=4, label=label)
    axes.axhline(TARGET, color=TARGET_COLOUR, linestyle="--", linewidth=1.0)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("sessions per second")
    axes.set_ylabel(f"{criterion.removeprefix('sustained_')} attained")
    legend_above(axes, columns=3)
