"""Collects what a machine with torch and a GPU, and without a network, lacks to run the stages.

    python -m tools.gpu_day.pack FOLDER [--python 3.12]

Downloads the pinned wheels for Linux on x86-64 into FOLDER, and fails if they are larger than one upload.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"

PACKAGES = (
    "annotated-types", "hypothesis", "iniconfig", "msgspec", "pluggy", "psutil", "pydantic", "pydantic-core",
    "pygments", "pytest", "pytest-asyncio", "pyzmq", "sortedcontainers", "typing-extensions", "typing-inspection",
    "xxhash",
)  # fmt: skip
"""Of the stages without SGLang. torch, numpy and packaging are there."""

MOST_BYTES = 40 << 20
"""Together with the repository it has to stay below 64 MiB."""

_GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34)


def pinned(names: Sequence[str], constraints: str) -> list[str]:
    """The names with the versions of the constraints, where these have one."""
    versions = dict(re.findall(r"^([a-z0-9.-]+)==([^ ;\\]+)", constraints, re.MULTILINE))
    return [f"{name}=={versions[name]}" if name in versions else name for name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """Download; returns 1 if it is too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine")
    arguments = parser.parse_args(argv)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--implementation=cp"]
    command += ["--python-version", arguments.python, *platforms, "--platform=manylinux2014_x86_64"]
    command += ["--dest", str(arguments.folder), *pinned(PACKAGES, CONSTRAINTS.read_text())]
    subprocess.run(command, check=True)
    size = sum(file.stat().st_size for file in arguments.folder.glob("*.whl"))
    print(f"{len(list(arguments.folder.glob('*.whl')))} wheels, {size >> 20} MiB of {MOST_BYTES >> 20}")
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
