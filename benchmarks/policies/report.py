"""The contest's tables, in Markdown."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from benchmarks import markdown_table
from benchmarks.geometric import geometric_mean
from benchmarks.intervals import Interval
from benchmarks.policies.contest import Contestant
from benchmarks.policies.contestants import ALWAYS_REMOTE, AMPD, COLOCATED_OURS, OURS
from benchmarks.policies.settings import Setting
from benchmarks.policies.standings import Groups, Standings

TITLES = {
    "sustained_rounds": "sustained goodput of rounds",
    "sustained_sessions": "sustained goodput of sessions",
}
AGAINST = ("best rival", "ampd", "always-remote", "best co-located", COLOCATED_OURS.label)

Opponent = Callable[[Setting], Contestant | None]


def opponents(standings: Standings, criterion: str) -> dict[str, Opponent]:
    """Who ours is compared with, by the names of `AGAINST`."""
    present = standings.contestants
    return {
        "best rival": lambda setting: standings.best(setting, standings.rivals, criterion),
        "ampd": lambda _: AMPD if AMPD in present else None,
        "always-remote": lambda _: ALWAYS_REMOTE if ALWAYS_REMOTE in present else None,
        "best co-located": lambda setting: standings.best(setting, standings.references, criterion),
        COLOCATED_OURS.label: lambda _: COLOCATED_OURS if COLOCATED_OURS in present else None,
    }


def tables(standings: Standings, groups: Groups) -> dict[str, str]:
    """All tables, in Markdown, by title. The summary has geometric means over the settings."""
    found = {"summary": summary_table(standings, groups)}
    for criterion, title in TITLES.items():
        found[f"{title}, ours against others"] = ratio_table(standings, groups, criterion)
        found[f"{title}, sessions per second"] = goodput_table(standings, groups, criterion)
    return found


def summary_table(standings: Standings, groups: Groups) -> str:
    """A row for each criterion and group."""
    everything = list(dict.fromkeys(setting for settings in groups.values() for setting in settings))
    parts = groups | ({"all": everything} if len(groups) > 1 else {})
    rows = []
    for criterion, title in TITLES.items():
        for group, settings in parts.items():
            cells = []
            lowest = inf
            for name, other in opponents(standings, criterion).items():
                ratios = standings.ratios(settings, other, criterion)
                cells.append(f"{geometric_mean(ratios):.2f} (n={len(ratios)})" if ratios else "-")
                if name == "best rival":
                    lowest = min(ratios, default=inf)
            rows.append([title, group, *cells, f"{lowest:.2f}" if lowest < inf else "-"])
    return markdown_table.table(["", "settings", *(f"/ {name}" for name in AGAINST), "lowest / best rival"], rows)


def ratio_table(standings: Standings, groups: Groups, criterion: str) -> str:
    """Ours and how many times the others' it is, for every setting."""
    rows = []
    for group, settings in groups.items():
        for setting in settings:
            mine = standings.goodput(setting, OURS, criterion)
            row = [group, setting.name, goodput_text(mine)]
            for name, opponent in opponents(standings, criterion).items():
                other = opponent(setting)
                row.append(ratio_text(standings.ratio(setting, OURS, other, criterion)))
                if name.startswith("best") and other is not None:
                    row[-1] += f" {other.label}"
            rows.append(row)
    return markdown_table.table(["", "setting", "ours", *(f"/ {name}" for name in AGAINST)], rows)


def goodput_table(standings: Standings, groups: Groups, criterion: str) -> str:
    """Every contestant in every setting."""
    rows = [
        [
            setting.name,
            *(goodput_text(standings.goodput(setting, contestant, criterion)) for contestant in standings.contestants),
        ]
        for setting in dict.fromkeys(setting for settings in groups.values() for setting in settings)
    ]
    return markdown_table.table(["setting", *(contestant.label for contestant in standings.contestants)], rows)


def goodput_text(interval: Interval | None) -> str:
    """As 12.3 ± 0.4, or 12.3 with a single seed."""
    if interval is None:
        return ""
    text = f"{interval.mean:.3g}"
    return text if interval.seeds == 1 else f"{text} ± {interval.half:.2g}"


def ratio_text(ratio: tuple[float, float, float] | None) -> str:
    """As 1.52 (1.41..1.63)."""
    if ratio is None:
        return "-"
    mean, low, high = ratio
    return f"{mean:.2f}" if high == inf else f"{mean:.2f} ({low:.2f}..{high:.2f})"
