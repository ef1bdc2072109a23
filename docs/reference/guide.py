"""The guide with the outputs that its commands have now, of those that need no graph and no cluster.

    python -m docs.reference.guide

runs them in an empty folder and prints the page. A plan has all the time that it wants, so that a busy machine gives
the same page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "guide.md"
_MADE = re.compile(r"ampd (?:trace list|trace stats|simulate|plan)\b|grep ampd\.dev/")
_BLOCK = re.compile(r"(```console\n)(.*?)(```)", re.DOTALL)
_SECONDS = re.compile(r"(planned in )[\d.]+ s")


def commands(block: str) -> Iterator[tuple[str, str]]:
    """The commands of a block of the page as they are typed, and what the page has as their output."""
    for part in re.split(r"^(?=\$ )", block, flags=re.MULTILINE):
        if shown := re.match(r"\$ ((?:.*\\\n)*.*\n)", part):
            yield shown[1], part[shown.end() :]


def made(page: str) -> str:
    """The page with new outputs. A command that has none on the page gets none."""
    with tempfile.TemporaryDirectory() as folder:
        return _BLOCK.sub(lambda found: found[1] + _with_outputs(found[2], Path(folder)) + found[3], page)


def _with_outputs(block: str, folder: Path) -> str:
    parts = []
    for command, output in commands(block):
        is_made = output and _MADE.match(command)
        parts.append(f"$ {command}{_output(command, folder) if is_made else output}")
    return "".join(parts)


def _output(command: str, folder: Path) -> str:
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    argv = [sys.executable, "-m", *words] if words[0] == "ampd" else words
    paths = [str(PAGE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"AMPD_BUDGET_S": "1e6", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return _SECONDS.sub(r"\1... s", done.stdout)


if __name__ == "__main__":
    print(made(PAGE.read_text(encoding="utf-8")), end="")
