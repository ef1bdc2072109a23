"""A Grafana dashboard drawn with matplotlib: every panel at its place, with its title, its legend and its values."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

COLUMNS = 24
WIDTH_IN = 16.0
UNIT_IN = 0.28
"""Height of one of Grafana's rows."""
GAP = 0.12
DPI = 96
PALETTE = ("#4c8f3a", "#d9a60d", "#3b78b8", "#d9682b", "#b83b5e", "#7d53a8", "#2f9c95", "#8a6d3b", "#5c6670", "#c77cba")
NAMED = {
    "green": "#4c8f3a",
    "red": "#c4162a",
    "orange": "#e0752d",
    "dark-orange": "#b5501b",
    "yellow": "#d9a60d",
    "blue": "#3b78b8",
    "text": "#8c939a",
}
MOST_LEGENDS = 8


@dataclass(frozen=True)
class Series:
    """One series of an answer: (seconds since the start, value)."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]

    def named(self, legend: str) -> str:
        """The legend with this series's labels filled in."""
        return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: self.labels.get(match[1], ""), legend).strip()


@dataclass(frozen=True)
class Panel:
    """A panel and what it shows: (name, series) in the order of its expressions."""

    source: Mapping[str, Any]
    lines: Sequence[tuple[str, Series]]

    @classmethod
    def of(cls, source: Mapping[str, Any], answers: Sequence[Sequence[Series]]) -> Panel:
        """Put a panel and the answers to its expressions together."""
        targets = source.get("targets", [])
        lines = [
            (series.named(target["legendFormat"]), series)
            for target, answer in zip(targets, answers, strict=True)
            for series in sorted(answer, key=lambda drawn: drawn.named(target["legendFormat"]))
        ]
        return cls(source, lines)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Unit, bounds, thresholds."""
        return dict(self.source["fieldConfig"]["defaults"])

    def style(self, name: str) -> dict[str, Any]:
        """The properties that are overridden for one series."""
        return {
            setting["id"]: setting["value"]
            for override in self.source["fieldConfig"]["overrides"]
            if override["matcher"]["options"] == name
            for setting in override["properties"]
        }


def draw(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Write the picture as a PNG of few colours."""
    rows = max(panel.source["gridPos"]["y"] + panel.source["gridPos"]["h"] for panel in panels)
    height_in = (rows + 1.6) * UNIT_IN
    pyplot.rcParams.update({"font.size": 7, "font.family": "DejaVu Sans", "axes.linewidth": 0.5})
    figure = Figure(figsize=(WIDTH_IN, height_in), facecolor="#f4f5f5")
    figure.text(0.006, 1 - 0.8 * UNIT_IN / height_in, title, fontsize=10, weight="bold", va="center")
    for panel in panels:
        _draw_panel(figure, panel, height_in)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI, format="png", facecolor=figure.get_facecolor())
    image = Image.open(buffer).convert("RGB").quantize(colors=160, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


def _draw_panel(figure: Figure, panel: Panel, height_in: float) -> None:
    place = panel.source["gridPos"]
    unit = UNIT_IN / height_in
    left, width = place["x"] / COLUMNS, place["w"] / COLUMNS
    bottom, height = 1 - (place["y"] + place["h"] + 1.6) * unit, place["h"] * unit
    if panel.source["type"] == "row":
        figure.text(left + 0.006, bottom + 0.45 * height, "⌄ " + panel.source["title"], fontsize=9.5, weight="bold")
        return
    pad_x, pad_y = GAP / WIDTH_IN / 2, GAP / height_in / 2
    card = figure.add_axes((left + pad_x, bottom + pad_y, width - 2 * pad_x, height - 2 * pad_y), facecolor="white")
    card.set_xticks([])
    card.set_yticks([])
    for side in card.spines.values():
        side.set_color("#d5d8db")
    figure.text(left + 0.008, bottom + height - 0.75 * unit, panel.source["title"], fontsize=8, weight="bold")
    if panel.source["type"] == "stat":
        _draw_stat(figure, panel, (left + width / 2, bottom + 0.38 * height))
        return
    frame = (left + 0.034, bottom + 2.0 * unit, width - 0.044, height - 3.3 * unit)
    _draw_lines(figure, panel, frame, bottom + 0.25 * unit, left + 0.008)


def _draw_stat(figure: Figure, panel: Panel, centre: tuple[float, float]) -> None:
    values = [series.points[-1][1] for _, series in panel.lines if series.points]
    value = values[0] if values else math.nan
    color = NAMED["text"]
    for step in panel.defaults.get("thresholds", {}).get("steps", []):
        if step["value"] is None or value >= step["value"]:
            color = NAMED[step["color"]]
    figure.text(*centre, _words(panel, value), fontsize=20, color=color, weight="bold", ha="center", va="center")


def _words(panel: Panel, value: float) -> str:
    if math.isnan(value):
        return "no data"
    for mapping in panel.defaults.get("mappings", []):
        if f"{value:g}" in mapping["options"]:
            return str(mapping["options"][f"{value:g}"]["text"])
    return formatted(value, panel.defaults["unit"])


def _draw_lines(
    figure: Figure, panel: Panel, frame: tuple[float, float, float, float], legend_y: float, legend_x: float
) -> None:
    axes = figure.add_axes(frame, facecolor="none")
    defaults = panel.defaults
    stacked = "stacking" in defaults["custom"]
    below: dict[float, float] = {}
    handles: list[Any] = []
    for index, (name, series) in enumerate(panel.lines):
        style = panel.style(name)
        color = NAMED.get(style.get("color", {}).get("fixedColor", ""), PALETTE[index % len(PALETTE)])
        points = [(at, value) for at, value in series.points if math.isfinite(value)]
        times = [at for at, _ in points]
        base = [below.get(at, 0.0) if stacked else 0.0 for at in times]
        values = [low + value for low, (_, value) in zip(base, points, strict=True)]
        dashes = "--" if "custom.lineStyle" in style else "-"
        (line,) = axes.plot(times, values, color=color, lw=1.0, ls=dashes, label=name)
        if stacked:
            axes.fill_between(times, base, values, color=color, alpha=0.3, lw=0)
            below.update(zip(times, values, strict=True))
        if name not in [each.get_label() for each in handles]:
            handles.append(line)
    _scale(axes, panel)
    # A line at zero shall not hide behind the axis.
    low, high = axes.get_ylim()
    axes.set_ylim(bottom=low - 0.04 * (high - low))
    shown = handles[:MOST_LEGENDS]
    if shown:
        figure.legend(
            handles=shown,
            labels=[str(line.get_label()) for line in shown[:-1]]
            + [str(shown[-1].get_label()) + (f"  + {len(handles) - len(shown)}" if len(handles) > len(shown) else "")],
            loc="lower left",
            bbox_to_anchor=(legend_x, legend_y),
            ncols=4 if len(shown) > 3 else 3,
            fontsize=6,
            frameon=False,
            borderaxespad=0,
            handlelength=1.2,
            columnspacing=1.0,
            labelspacing=0.15,
        )
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=NAMED["text"])


def _scale(axes: Any, panel: Panel) -> None:
    defaults = panel.defaults
    if "min" in defaults:
        axes.set_ylim(bottom=defaults["min"])
    top = defaults.get("max")
    if top is not None:
        axes.set_ylim(top=top * 1.02)
    elif axes.get_ylim()[1] <= 0.06 and not any(
        value for _, series in panel.lines for _, value in series.points if value > 0
    ):
        axes.set_ylim(top=1.0)
    for step in defaults.get("thresholds", {}).get("steps", []):
        if step["value"] is not None and step["color"] in NAMED:
            axes.axhline(step["value"], color=NAMED[step["color"]], lw=0.8, ls="--")
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formatted(value, defaults["unit"])))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{int(at) // 60}:{int(at) % 60:02d}"))
    axes.tick_params(labelsize=6, length=2, width=0.4, pad=1.5, colors="#555b61")
    axes.grid(color="#e6e8ea", lw=0.5)
    axes.margins(x=0.01)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def formatted(value: float, unit: str) -> str:
    """A value as Grafana writes it in that unit."""
    if unit == "s":
        return f"{value:.3g} s" if abs(value) >= 1 else f"{value * 1000:.3g} ms" if value else "0 s"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}{_UNITS.get(unit, '')}".rstrip()
    return f"{value:.3g}{_UNITS.get(unit, '')}"


_UNITS = {"Bps": "B/s", "reqps": "/s", "ops": "/s"}
