"""Pages of reports: a title, a lead and cards with text, tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

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
