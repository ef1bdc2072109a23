"""docs/top.md names every column and every key of the JSON, and no other."""

import re
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.top_screen import as_text
from tests.ampd.cli.top.test_render import BREAKING, healthy

PAGE = (Path(__file__).parents[2] / "docs" / "top.md").read_text("utf-8")
KEYS = PAGE[PAGE.index("## JSON") :]


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z][a-z0-9_]*", " ".join(re.findall(r"`([^`]*)`", text))))


def names(part: Any) -> set[str]:
    """All keys in a part of the JSON."""
    if isinstance(part, list):
        return {name for row in part for name in names(row)}
    return set(part) | {name for value in part.values() for name in names(value)} if isinstance(part, dict) else set()


@pytest.mark.parametrize("key", ["slo", "window", "coordinators", "workers", "kv", "sessions"])
def test_each_part_of_the_json_has_its_keys_there(key: str) -> None:
    (row,) = re.findall(rf"^\| `{key}` \| (.*) \|$", KEYS, re.MULTILINE)
    assert words(row) == names(healthy(breaking=(BREAKING,))[key])


def test_the_whole_has_its_keys_there() -> None:
    heads = [row.split("|")[1] for row in KEYS.splitlines() if row.startswith("| `")]
    assert words(" ".join(heads)) == set(healthy())


def test_every_column_of_the_kv_is_there() -> None:
    (heading,) = [line for line in as_text(healthy(), 120).splitlines() if line.startswith("KV hits")]
    section = PAGE[PAGE.index("### KV") : PAGE.index("### Routes")]
    for column in heading.replace("KV hits", "").split():
        assert re.search(rf"\b{column}\b", section), column


def test_every_column_of_a_worker_is_there() -> None:
    (heading,) = [line for line in as_text(healthy(), 120).splitlines() if line.startswith("worker")]
    section = PAGE[PAGE.index("### Workers") : PAGE.index("### Routes")]
    columns = heading.split()
    assert {"queue", "times", "held"} <= set(columns)
    for column in set(columns) - {"worker", "role"}:
        assert re.search(rf"\b{column}\b", section), column
