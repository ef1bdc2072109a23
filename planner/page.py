"""HTML reports of simulations and plans: one file that needs nothing else, in the style of the replay's report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from ampd.errors import RunError


@dataclass(frozen=True, slots=True)
class Section:
    """A card of a report: sentences, a table, a picture, or all of them."""

    title: str
    text: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    svg: str = ""
    is_half: bool = False


def render_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The report as HTML."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("planner"), PackageLoader("workloads")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html.j2").render(title=title, lead=lead, sections=sections)


def write_page(path: Path, title: str, lead: str, sections: Sequence[Section]) -> None:
    """Write a report. Raises `RunError` if the file cannot be written."""
    try:
        path.write_text(render_page(title, lead, sections), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None
