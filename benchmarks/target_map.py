"""Attainment over a map of TTFT and ITL targets: ours from the even split, against every static layout of our parts.

    python -m benchmarks.target_map --data map.jsonl --write benchmarks/results/policies \
        --picture docs/pictures/target-map.svg

Each workload arrives at one fixed rate, near what the even split carries at the targets in the middle of the map. All
layouts serve the same sessions in a cell, with the same arrivals and the same random choices. Static layouts are
simulated first. In each cell, ours is compared with the static layout that turned out best. An operator would have to
choose that layout before the load is known.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from pydantic import Field

from ampd.documents import check_writable
from ampd.errors import guarded
from ampd.settings import Settings, parse_settings
from benchmarks import markdown_table, result_files
from benchmarks.best_layouts.entries import Entry, splits
from benchmarks.best_layouts.search import Searcher
from benchmarks.policies.campaign import Ledger
from benchmarks.policies.contest import Point
from benchmarks.policies.contestants import COLOCATED_OURS, OURS_AHEAD, OURS_STATIC
from benchmarks.policies.settings import Setting

PROG = "python -m benchmarks.target_map"
_RESULTS = "target map"
TTFT_FACTORS = (0.5, 0.75, 1.0, 1.5, 3.0)
ITL_FACTORS = (0.5, 0.75, 1.0, 1.5, 3.0)
"""Times the targets in the middle."""
FIGURES = ("rounds", "sessions")
_DYNAMIC = (OURS_AHEAD,)
"""Ours from the even split. The first one is in the map, and others in the summary only."""
_EQUAL = 0.005
"""Shares that differ by less count as equal in the summary."""


@dataclass(frozen=True)
class Workload:
    """A setting with an even split of its workers, its middle targets, and the rate of its sessions per second."""

    setting: Setting
    rate: float

    def cells(self) -> Iterator[Setting]:
        """The setting with every pair of targets: a row for each TTFT."""
        for ttft in TTFT_FACTORS:
            for itl in ITL_FACTORS:
                yield replace(
                    self.setting,
                    ttft_s=round(ttft * self.setting.ttft_s, 6),
                    itl_s=round(itl * self.setting.itl_s, 6),
                )


WORKLOADS = (
    Workload(Setting("qwen3-32b", "l40s", "toolbench", "2xTP2", "2xTP2", 0.8, 0.08, duration_s=180.0), 3.5),
    Workload(Setting("llama-3.1-70b", "l40s", "tau-bench-airline", "2xTP4", "2xTP4", 1.5, 0.09, duration_s=180.0), 1.4),
)


class TargetMapSettings(Settings):
    """Map what ours attains at many targets, against static layouts."""

    only: str = Field("", description="Only workloads whose names contain this.")
    data: Path | None = Field(None, description="JSON lines of simulations; what it has already is not made again.")
    static: bool = Field(False, description="Static layouts only: a table of how each does over the map.")
    again: str = Field("", description="Contestants whose simulations are made again, separated by semicolons.")
    write: Path | None = Field(None, description="Folder for the tables as CSV files; default: print them.")
    picture: Path | None = Field(None, description="SVG file for the map.")


@dataclass(frozen=True)
class Cell:
    """One pair of targets. Keys are labels of entries."""

    setting: Setting
    dynamic: Mapping[str, Point]
    static: Mapping[str, Point]

    def ours(self, figure: str) -> float:
        """What the recommended start attains."""
        return float(getattr(next(iter(self.dynamic.values())), figure))

    def best(self, figure: str) -> tuple[float, str]:
        """(share, name) of the best static layout."""
        name, point = max(self.static.items(), key=lambda item: float(getattr(item[1], figure)))
        return float(getattr(point, figure)), name


Maps = Mapping[Workload, Sequence[Cell]]


def static_entries(setting: Setting) -> dict[str, Entry]:
    """Every static layout of our parts, by its short name."""
    entries = {"co-located": Entry(COLOCATED_OURS, setting)}
    return entries | {
        entry.label.split()[-1]: entry for split in splits(setting) for entry in (Entry(OURS_STATIC, split),)
    }


def maps_of(workloads: Sequence[Workload], searcher: Searcher) -> Maps:
    """All cells; static layouts first, because they do not depend on the code that changes roles."""
    for workload in workloads:
        for setting in workload.cells():
            for entry in static_entries(setting).values():
                searcher.point(entry, 0, workload.rate)
            searcher.report(f"{setting.name} {setting.gpu} {_targets(setting)}")
    maps: dict[Workload, list[Cell]] = {}
    for workload in workloads:
        maps[workload] = []
        for setting in workload.cells():
            static = {name: searcher.point(entry, 0, workload.rate) for name, entry in static_entries(setting).items()}
            dynamic = {each.label: searcher.point(Entry(each, setting), 0, workload.rate) for each in _DYNAMIC}
            maps[workload].append(Cell(setting, dynamic, static))
            searcher.report(f"{setting.name} {setting.gpu} {_targets(setting)}, dynamic")
    return maps


def static_table(workloads: Sequence[Workload], searcher: Searcher) -> str:
    """In how many cells each static layout is the best or equal to it, and how far it is below at most."""
    rows = []
    for workload in workloads:
        cells = [
            {name: searcher.point(entry, 0, workload.rate) for name, entry in static_entries(setting).items()}
            for setting in workload.cells()
        ]
        for figure in FIGURES:
            behind: dict[str, list[float]] = {name: [] for name in cells[0]}
            for cell in cells:
                shares = {name: float(getattr(point, figure)) for name, point in cell.items()}
                for name, share in shares.items():
                    behind[name].append(max(shares.values()) - share)
            texts = [
                f"{name}: {sum(each <= _EQUAL for each in differences)}, {100 * max(differences):.0f} points"
                for name, differences in behind.items()
            ]
            rows.append([workload.setting.name, figure, *texts])
    return markdown_table.table(["workload", "", *(["best in, at most below"] * (len(rows[0]) - 2))], rows)


def _targets(setting: Setting) -> str:
    return f"{setting.ttft_s:g} s, {1e3 * setting.itl_s:g} ms"


def tables(maps: Maps) -> dict[str, str]:
    """The summary, and a map of each workload and figure (in %, ours / best static layout), in Markdown, by title."""
    found = {"summary": summary_table(maps)}
    for workload, cells in maps.items():
        for figure in FIGURES:
            setting = workload.setting
            found[f"{setting.model} {setting.trace} {setting.gpu}, {figure}"] = map_table(cells, figure)
    return found


def summary_table(maps: Maps) -> str:
    """How often each start of ours is below static layouts, and by how much at most."""
    rows = []
    for workload, cells in maps.items():
        for figure in FIGURES:
            for each in _DYNAMIC:
                mine = [float(getattr(cell.dynamic[each.label], figure)) for cell in cells]
                row = [f"{workload.setting.trace}, {figure}", each.label]
                for name in ("2+2", "co-located"):
                    row += _compared(mine, [float(getattr(cell.static[name], figure)) for cell in cells])
                row += _compared(mine, [cell.best(figure)[0] for cell in cells])
                rows.append(row)
    heads = [
        f"{what} {name}"
        for name in ("2+2", "co-located", "best static")
        for what in ("mean against", "lowest,", "below")
    ]
    return markdown_table.table(["workload", "start of ours", *heads], rows)


def _compared(mine: Sequence[float], theirs: Sequence[float]) -> list[str]:
    differences = [our - their for our, their in zip(mine, theirs, strict=True)]
    below = sum(difference < -_EQUAL for difference in differences)
    mean = sum(differences) / len(differences)
    return [f"{100 * mean:+.1f}", f"{100 * min(differences):+.1f}", f"{below} of {len(differences)}"]


def map_table(cells: Sequence[Cell], figure: str) -> str:
    """A row for each TTFT target, a column for each ITL target."""
    columns = len(ITL_FACTORS)
    rows = []
    for at in range(0, len(cells), columns):
        row = [f"{cells[at].setting.ttft_s:g} s"]
        for cell in cells[at : at + columns]:
            best, name = cell.best(figure)
            mine = cell.ours(figure)
            text = f"{100 * mine:.1f} / {100 * best:.1f} {name}"
            row.append(f"**{text}**" if mine < best - _EQUAL else text)
        rows.append(row)
    return markdown_table.table(
        ["TTFT \\ ITL", *(f"{1e3 * cell.setting.itl_s:g} ms" for cell in cells[:columns])], rows
    )


def draw(maps: Maps, path: Path) -> None:
    """The differences to the best static layout, as a picture."""
    style = {"svg.fonttype": "none", "svg.hashsalt": "ampd", "font.size": 8, "font.family": "sans-serif"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(11.0, 3.9 * len(maps)), layout="constrained", facecolor="white")
        axes = figure.subplots(len(maps), len(FIGURES), squeeze=False)
        for row, (workload, cells) in zip(axes, maps.items(), strict=True):
            for panel, name in zip(row, FIGURES, strict=True):
                _panel(panel, workload, cells, name)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _panel(axes: Any, workload: Workload, cells: Sequence[Cell], figure: str) -> None:
    columns = len(ITL_FACTORS)
    points = [100 * (cell.ours(figure) - cell.best(figure)[0]) for cell in cells]
    rows = [points[at : at + columns] for at in range(0, len(points), columns)]
    axes.imshow(rows, cmap="RdBu", vmin=-12, vmax=12, aspect="auto")
    for at, (cell, difference) in enumerate(zip(cells, points, strict=True)):
        colour = "white" if abs(difference) > 8 else "black"
        best, name = cell.best(figure)
        text = f"{difference:+.1f}\n{100 * best:.0f} % {name}"
        axes.text(at % columns, at // columns, text, ha="center", va="center", color=colour, fontsize=6.5)
    axes.set_xticks(range(columns), [f"{1e3 * cell.setting.itl_s:g}" for cell in cells[:columns]])
    axes.set_yticks(range(len(rows)), [f"{cell.setting.ttft_s:g}" for cell in cells[::columns]])
    axes.set_xlabel("ITL target, ms")
    axes.set_ylabel("TTFT target, s")
    axes.set_title(f"{workload.setting.name} {workload.setting.gpu}, {workload.rate:g}/s: {figure}", fontsize=9)


def run(argv: Sequence[str]) -> int:
    """Map all workloads.

    Raises:
        UserError: wrong flags, a folder that does not exist, a data file of something else.
    """
    options = parse_settings(TargetMapSettings, argv, PROG)
    check_writable(options.data, options.picture)
    result_files.check_folder(options.write)
    workloads = [each for each in WORKLOADS if options.only in f"{each.setting.name} {each.setting.gpu}"]
    again = frozenset(label.strip() for label in options.again.split(";"))
    searcher = Searcher(Ledger(options.data, again), 1.0, _report)
    if options.static:
        print(static_table(workloads, searcher))
        return 0
    maps = maps_of(workloads, searcher)
    if options.picture:
        draw(maps, options.picture)
    if options.write:
        result_files.write(options.write, _RESULTS, tables(maps), shlex.join([*PROG.split(), *argv]))
    else:
        print(markdown_table.titled(tables(maps)))
    return 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Entry point."""
    return guarded(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
