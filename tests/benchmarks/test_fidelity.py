"""How far the simulator is from the live graph: what the benchmark leaves on the machine."""

import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity import measured_profile


def test_measured_points_are_kept_where_nobody_else_can_have_put_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixed name in the system's temporary folder could be a link that another user has made."""
    points: list[Path] = []

    def run(argv: list[str], **_: Any) -> None:
        points.append(Path(argv[argv.index("--points") + 1]))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for _ in range(2):
        measured_profile(tmp_path, 1000)
    assert len({path.parent for path in points}) == 2
    for path in points:
        assert path.parent.parent == tmp_path
        assert not path.exists()
        assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IRWXU
