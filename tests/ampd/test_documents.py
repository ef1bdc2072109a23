"""Files that cannot be written are refused before any work is done."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ampd.documents import check_writable
from ampd.errors import UserError


def _without(*locked: Path) -> Callable[[Path, int], bool]:
    """`os.access` for a user who may write everything but the locked paths. To root it always says yes."""
    return lambda path, _: path not in locked


def test_a_file_in_a_missing_folder_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "x.html", tmp_path):
        with pytest.raises(UserError, match="cannot be written"):
            check_writable(path)
    check_writable(None, tmp_path / "x.html")


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", _without(tmp_path))
    with pytest.raises(UserError, match=r"x\.html: cannot be written; you have no permission to write in its folder"):
        check_writable(tmp_path / "x.html")


def test_an_existing_file_needs_only_its_own_permission_unless_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `--report /dev/null` works for everyone."""
    path = tmp_path / "x.html"
    path.touch()
    monkeypatch.setattr(os, "access", _without(tmp_path))
    check_writable(path)
    with pytest.raises(UserError, match="in its folder"):
        check_writable(path, replaces=True)
    monkeypatch.setattr(os, "access", _without(path))
    check_writable(path, replaces=True)
    with pytest.raises(UserError, match="to write this file"):
        check_writable(path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="no permission"):
        check_writable(tmp_path / "x.html")
