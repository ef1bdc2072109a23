"""The tables in a document."""

from __future__ import annotations

from pathlib import Path

from benchmarks.policies.report import put_between_markers


def test_only_the_marked_part_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nb\n<!-- x: begin -->\nc\n<!-- x: end -->\n")
    put_between_markers(path, "tables", "new")
    assert path.read_text() == (
        "a\n<!-- tables: begin -->\n\nnew\n\n<!-- tables: end -->\nb\n<!-- x: begin -->\nc\n<!-- x: end -->\n"
    )
