"""Links of the pages: every relative one leads to a file, and to a heading in it."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = sorted(
    [
        _ROOT / "README.md",
        *(_ROOT / "docs").rglob("*.md"),
        *(_ROOT / "k8s").rglob("*.md"),
        *(_ROOT / "benchmarks").rglob("*.md"),
    ]
)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")


@pytest.mark.parametrize("page", _PAGES, ids=[str(page.relative_to(_ROOT)) for page in _PAGES])
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = [target for target in links(page.read_text(encoding="utf-8")) if not _leads_somewhere(page, target)]
    assert broken == []


def test_the_pages_have_links() -> None:
    assert sum(1 for page in _PAGES for _ in links(page.read_text(encoding="utf-8"))) > 50


@pytest.mark.parametrize("page", sorted((_ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_page_is_in_the_index(page: Path) -> None:
    index = _ROOT / "docs" / "README.md"
    listed = {target.partition("#")[0] for target in links(index.read_text(encoding="utf-8"))}
    assert page == index or page.name in listed


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("## When it is ready", "when-it-is-ready"),
        ("### `a-b` and *c_d*: e, f (g)", "a-b-and-c_d-e-f-g"),
        ("## python -m workers --engine x", "python--m-workers---engine-x"),
        ("## A [link](x.md) in it", "a-link-in-it"),
    ],
)
def test_anchors_are_made_as_on_github(heading: str, anchor: str) -> None:
    assert anchors(heading) == {anchor}


def test_headings_of_the_same_words_are_counted() -> None:
    assert anchors("# A\n## B\n## A\n```\n# no heading\n```\n### A\n") == {"a", "b", "a-1", "a-2"}


def links(text: str) -> Iterator[str]:
    """Targets of the relative links of a page; code is left out."""
    prose = re.sub(r"`[^`\n]*`", "", "\n".join(_prose(text)))
    for target in _LINK.findall(prose):
        if not re.match(r"[a-z][a-z0-9+.-]*:", target):
            yield target


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    for line in _prose(text):
        heading = _HEADING.match(line)
        if not heading:
            continue
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def _prose(text: str) -> Iterator[str]:
    """The lines outside of fenced code."""
    fence = ""
    for line in text.splitlines():
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
        elif not fence:
            yield line


def _leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = unquote(target).partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.exists():
        return False
    return not anchor or path.suffix != ".md" or anchor in anchors(path.read_text(encoding="utf-8"))
