"""The hashes of constraints.txt are verified when `make` installs: a file that differs is refused."""

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MAKEFILE = Path(__file__).parents[2].joinpath("Makefile").read_text()
UV = Path(sys.executable).with_name("uv")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package with one module."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "pinned-1.0-py3-none-any.whl"
    files = {
        "pinned.py": b"",
        "pinned-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: pinned\nVersion: 1.0\n",
        "pinned-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "pinned-1.0.dist-info/RECORD"
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, record: "\n".join([*lines, f"{record},,"]).encode()}.items():
            archive.writestr(name, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def install(tmp_path: Path, wheel: Path, sha256: str) -> subprocess.CompletedProcess[str]:
    """As the Makefile installs, from a folder instead of an index."""
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"pinned==1.0 \\\n    --hash=sha256:{sha256}\n")
    target = ["--target", str(tmp_path / "target"), "--python", sys.executable]
    source = ["--no-index", "--find-links", str(wheel.parent), "--no-cache"]
    command = [
        str(UV),
        "pip",
        "install",
        *target,
        *source,
        "--constraint",
        str(constraints),
        "--verify-hashes",
        "pinned",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))


def test_a_file_with_another_hash_is_refused(tmp_path: Path, wheel: Path) -> None:
    refused = install(tmp_path, wheel, "0" * 64)
    assert refused.returncode != 0
    assert "Hash mismatch" in refused.stderr
    assert not (tmp_path / "target" / "pinned.py").exists()


def test_the_file_that_was_pinned_is_installed(tmp_path: Path, wheel: Path) -> None:
    done = install(tmp_path, wheel, hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target" / "pinned.py").exists()


def test_make_verifies_whatever_it_installs() -> None:
    recipes = re.sub(r"\\\n\s*", "", MAKEFILE)
    installs = [line for line in recipes.splitlines() if " pip install " in line and not line.startswith("#")]
    # The clients of docs/clients.md are no part of AMPD, and are tried in their newest versions.
    own = [line for line in installs if "$(CLIENTS)" not in line and "$(AIPERF)" not in line]
    assert (len(installs), len(own)) == (6, 4)
    for line in own:
        assert "--constraint constraints.txt" in line or "--require-hashes" in line, line
        assert "--no-verify-hashes" not in line
