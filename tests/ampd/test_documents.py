"""Files that cannot be written are refused before any work is done."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ampd.documents import check_writable
from ampd.errors import UserError


def _lock(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a user who may write everything but this path. Root may write everywhere."""
    create = tempfile.TemporaryFile

    def creates(*, dir: Path) -> Any:
        if dir == locked:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return create(dir=dir)

    monkeypatch.setattr(os, "access", lambda path, _: path != locked)
    monkeypatch.setattr(tempfile, "TemporaryFile", creates)


def test_a_file_in_a_missing_folder_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "x.html", tmp_path):
        with pytest.raises(UserError, match="cannot be written"):
            check_writable(path)
    check_writable(None, tmp_path / "x.html")


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _lock(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"x\.html: cannot be written; no file can be created in its folder \(Perm"):
        check_writable(tmp_path / "x.html")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no such file system")
def test_a_file_system_that_takes_no_files_is_refused_whatever_its_permissions_say() -> None:
    with pytest.raises(UserError, match=r"/proc/x\.html: cannot be written; no file can be created in its folder"):
        check_writable(Path("/proc/x.html"))


def test_an_existing_file_needs_only_its_own_permission_unless_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `--report /dev/null` works for everyone."""
    path = tmp_path / "x.html"
    path.touch()
    with monkeypatch.context() as locked:
        _lock(tmp_path, locked)
        check_writable(path)
        with pytest.raises(UserError, match="in its folder"):
            check_writable(path, replaces=True)
    _lock(path, monkeypatch)
    check_writable(path, replaces=True)
    with pytest.raises(UserError, match="to write this file"):
        check_writable(path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="no file can be created"):
        check_writable(tmp_path / "x.html")
