"""Pages of reports: a title, a lead, tiles with figures, and cards with text, tables and charts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ampd.errors import RunError

Shape = Literal["line", "dashed", "points"]


@dataclass(frozen=True, slots=True)
class Series:
    """A line, or points, of a chart.

    Attributes:
        colour: number of the page's colour, which is another one on dark pages. They repeat after eight.
        filled: of each point; empty: all are filled.
        notes: what each point is, shown where the pointer is; empty: nothing.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    shape: Shape = "line"
    colour: int = 0
    filled: Sequence[bool] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart that can be pointed at and zoomed.

    Attributes:
        levels: (value, name) of horizontal lines across it, such as targets. marks: of vertical ones.
        is_log: the y axis is logarithmic.
        height: in pixels of the screen.
        y_range: None: as the values need.
    """

    x_label: str
    y_label: str
    series: Sequence[Series]
    levels: Sequence[tuple[float, str]] = ()
    marks: Sequence[tuple[float, str]] = ()
    is_log: bool = False
    height: int = 240
    y_range: tuple[float, float] | None = None

    @property
    def as_json(self) -> Markup:
        """For a script element of a page, which nothing in it can end."""
        text = json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False)
        return Markup(text.replace("<", "\\u003c"))


@dataclass(frozen=True, slots=True)
class Section:
    """A card of a report: sentences, a table, a chart, or all of them.

    Attributes:
        anchor: name for links to this card; empty: it has none.
        is_list: the table has words in most columns, and may be longer than a printed page.
        is_warning: it tells that something went wrong.
    """

    title: str
    text: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    chart: Chart | None = None
    is_half: bool = False
    anchor: str = ""
    is_list: bool = False
    is_warning: bool = False


def write_page(
    path: Path, title: str, lead: str, sections: Sequence[Section], tiles: Sequence[tuple[str, str]] = ()
) -> None:
    """Write a report. `tiles`: (figure, what it is). Raises `RunError` if the file cannot be written."""
    page = rendered(title, lead, sections, tiles)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None


def rendered(title: str, lead: str, sections: Sequence[Section], tiles: Sequence[tuple[str, str]] = ()) -> str:
    """The page, which needs nothing from anywhere else."""
    template = _environment().get_template("page.html.j2")
    return template.render(title=title, lead=lead, sections=sections, tiles=tiles, part=_part)


@cache
def _environment() -> Environment:
    loader = PackageLoader("ampd.reports")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


@cache
def _part(name: str) -> Markup:
    """A file of the page, as it is."""
    return Markup(files("ampd.reports").joinpath("templates", name).read_text(encoding="utf-8").strip())
