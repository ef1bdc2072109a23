"""The page of plots: attainment over rate in every setting, and geometric means over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ampd.reports.page import Chart, Section, Series, write_page
from benchmarks.geometric import geometric_mean
from benchmarks.policies.contest import TARGET, Contestant
from benchmarks.policies.contestants import ALWAYS_REMOTE, AMPD, COLOCATED, OURS
from benchmarks.policies.report import TITLES
from benchmarks.policies.settings import Setting
from benchmarks.policies.standings import Groups, Standings
from planner.layout.trial import IN_TIME, TIME_FACTOR

_COLOURS = {"ours": 0, "best rival": 4, "ampd": 1, "always-remote": 3, "co-located": 2}
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
    ordered = sorted(((share, label) for label, share in shares.items() if share is not None), reverse=True)
    return Section(
        f"{TITLES[criterion].capitalize()}, all settings",
        text=[f"Settings in which a contestant carries nothing count as {_FLOOR:.0%} of ours."],
        head=("", f"{TITLES[criterion]} over that of ours, geometric mean"),
        rows=[[label, f"{share:.2f}"] for share, label in ordered],
    )


def _multiples(standings: Standings, settings: Sequence[Setting], criterion: str) -> Iterator[Section]:
    for setting in settings:
        lines = _lines(standings, setting, criterion)
        yield Section(
            f"{setting.name}: {TITLES[criterion]}",
            chart=_chart(lines, criterion),
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


def _chart(lines: dict[str, tuple[str, list[tuple[float, float]]]], criterion: str) -> Chart:
    series = [
        Series(label, [rate for rate, _ in line], [share for _, share in line], colour=_COLOURS[name])
        for name, (label, line) in lines.items()
    ]
    label = f"{criterion.removeprefix('sustained_')} attained"
    return Chart("sessions per second", label, series, [(TARGET, f"{TARGET:.0%}")], y_range=(0, 1.02))
