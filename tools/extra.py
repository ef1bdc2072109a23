"""Prints the packages of an extra of pyproject.toml, one per line: what `uv pip install --requirements -` reads.

By itself uv installs an extra only together with the project and all that it needs.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def packages_of(extra: str) -> list[str]:
    """The packages of an extra, with their versions."""
    extras: dict[str, list[str]] = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    return extras[extra]


if __name__ == "__main__":
    print("\n".join(packages_of(sys.argv[1])))
