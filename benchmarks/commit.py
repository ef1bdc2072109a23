"""The commit of the code that runs, for records of what was measured."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

UNKNOWN = "unknown"
_ROOT = Path(__file__).parents[1]


@cache
def commit(root: Path = _ROOT) -> str:
    """Its short hash, with `-dirty` if files differ from it; `UNKNOWN` without git or outside of a checkout."""
    argv = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        said = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return said.stdout.strip()
