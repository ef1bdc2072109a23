"""A broken installation is one line that names what is missing; a fault of our own keeps its traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from ampd.errors import guarded

ANEW = "install AMPD in a new environment"
ADVICE = "IMPORTANT: read this before you open an issue"


@pytest.mark.parametrize(
    ("code", "reason", "fix"),
    [
        ("import not_here", "No module named 'not_here'", ANEW),
        ("import cannot_load", "libblas.so: cannot open shared object file", ANEW),
        (
            "import dynamo",
            "import of dynamo halted; None in sys.modules",
            "serving needs Dynamo: uv pip install --editable '.[serve]' in AMPD's repository",
        ),
    ],
)
def test_a_package_that_cannot_be_imported_is_one_line(
    code: str,
    reason: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loader = "ImportError('libblas.so: cannot open shared object file')"
    (tmp_path / "cannot_load.py").write_text(
        f"try:\n    raise {loader}\nexcept ImportError as error:\n    raise ImportError({ADVICE!r}) from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "dynamo", None)
    assert guarded(lambda: exec(code) or 0) == 1  # type: ignore[func-returns-value]
    expected = f"ampd: a package is missing or broken: {reason}; {fix}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("code", ["import ampd.not_here", "from ampd.types import not_here"])
def test_a_missing_part_of_our_own_keeps_its_traceback(code: str) -> None:
    with pytest.raises(ImportError, match="not_here"):
        guarded(lambda: exec(code) or 0)  # type: ignore[func-returns-value]


def test_a_command_in_a_broken_installation_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizers.py").write_text("raise ImportError('libstdc++.so.6: cannot open shared object file')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from ampd.cli.main import main; sys.exit(main(['serve']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "libstdc++.so.6: cannot open shared object file; install AMPD in a new environment" in done.stderr
