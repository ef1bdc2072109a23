"""`python -m benchmarks.best_layouts`: refusals in one line, before any work."""

from pathlib import Path

import pytest

from ampd.errors import UserError
from benchmarks.best_layouts.__main__ import run


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(UserError, match="no setting's name contains 'nowhere'"):
        run(["--only", "nowhere"])


def test_results_go_to_a_folder_that_exists(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is no folder; create it first"):
        run(["--only", "tau-bench", "--write", str(tmp_path / "nowhere")])
