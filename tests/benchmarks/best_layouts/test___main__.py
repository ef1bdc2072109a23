"""`python -m benchmarks.best_layouts`: refusals in one line, before any work."""

from pathlib import Path

import pytest

from ampd.errors import UserError
from benchmarks.best_layouts.__main__ import run


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(UserError, match="no setting's name contains 'nowhere'"):
        run(["--only", "nowhere"])


def test_a_document_without_markers_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("nothing\n")
    with pytest.raises(UserError, match="has no lines <!-- best layouts: begin -->"):
        run(["--only", "tau-bench", "--write", str(document)])
