"""Pages of reports: a title, a lead and cards with text, tables and plots."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from ampd.errors import RunError


@dataclass(frozen=True, slots=True)
class Section:
    """A card of a report: sentences, a table, a picture, or all of them.

    Attributes:
        anchor: name for links to this card; empty: it has none.
        is_list: the table has words in most columns, and may be longer than a printed page.
    """

    title: str
    text: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    svg: str = ""
    is_half: bool = False
    anchor: str = ""
    is_list: bool = False


def template_environment(*packages: str) -> Environment:
    """Templates of these packages; they can include `style.css`."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "ampd.reports")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )


def write_page(path: Path, title: str, lead: str, sections: Sequence[Section]) -> None:
    """Write a report of sections. Raises `RunError` if the file cannot be written."""
    template = template_environment().get_template("page.html.j2")
    write_html(path, template.render(title=title, lead=lead, sections=sections))


def write_html(path: Path, page: str) -> None:
    """Write a rendered report. Raises `RunError` if the file cannot be written."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None


# -- Plots as inline SVG, in the style of our reports

HALF_CARD = (5.2, 3.0)
"""Size in inches of a plot that fills half the width of a report."""
FULL_CARD_WIDTH = 10.8
TARGET_COLOUR = "#3a3f4b"
_INK, _GRID, _AXES = "#1c2231", "#e6e9ef", "#9aa3b2"
_THEMED = {_INK: "currentColor", TARGET_COLOUR: "currentColor", _GRID: "var(--line)", _AXES: "var(--soft)"}
"""Colours that follow the page, which may be light or dark."""

_PALETTE = ("#2f6fde", "#e07b39", "#1f9d78", "#7b4fc9", "#c62f3c", "#8a6d1d", "#3aa6c4", "#5d687c")
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "svg.hashsalt": "ampd",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _GRID,
    "axes.edgecolor": _AXES,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "axes.axisbelow": True,
}
_MISSED = "#c62f3c"
_MS = 1e3


def colours(count: int) -> list[str]:
    """Colours of `count` lines; after eight they repeat."""
    return list(islice(cycle(_PALETTE), count))


def svg(draw: Callable[[Any], None], size_inches: tuple[float, float]) -> str:
    """The axes after `draw(axes)`, as one SVG element."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size_inches, layout="constrained")
        draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    # Only the element: no XML header, and no reference to the outside.
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for colour, themed in _THEMED.items():
        text = text.replace(colour, themed)
    return text


def mark_missed(axes: Any, at_s: Sequence[float], lanes: Sequence[float]) -> None:
    """A triangle wherever a round missed a target, with an entry in the legend. Without such rounds: nothing."""
    if at_s:
        axes.plot(at_s, lanes, "v", color=_MISSED, markersize=6, label="missed a target", linestyle="none")


def legend_above(axes: Any, columns: int = 4) -> None:
    """The legend above the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, labels, frameon=False, fontsize=8, ncols=columns, loc="lower left", bbox_to_anchor=(0.0, 1.0)
        )


def draw_cdf(axes: Any, series: Mapping[str, tuple[Sequence[float], str]], target_s: float | None, label: str) -> None:
    """Cumulative shares of name -> (seconds, colour), in milliseconds, with the target as a line."""
    for name, (values_s, colour) in series.items():
        if values_s:
            ordered = np.sort(np.asarray(values_s)) * _MS
            share = np.arange(1, len(ordered) + 1) / len(ordered)
            axes.step(ordered, share, where="post", color=colour, linewidth=1.8, label=name or None)
    if target_s is not None:
        axes.axvline(target_s * _MS, color=TARGET_COLOUR, linestyle="--", linewidth=1.2, label="SLO")
    values = [value for values_s, _ in series.values() for value in values_s if value > 0]
    if values and max(values) > 20 * np.median(values):
        axes.set_xscale("log")
        # Tokens of one chunk have gaps near zero, which would take half of the width.
        axes.set_xlim(left=float(np.quantile(values, 0.02)) * _MS / 2)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(label)
    axes.set_ylabel("share")
    legend_above(axes, columns=3)
