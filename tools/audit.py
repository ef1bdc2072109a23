"""`make audit`: compares the pinned packages with the advisories that are known, and fails if there is one.

It also fails if it could not be made: the service cannot be reached, or has no data. To know the latter, it first looks
up the canary, an old version with known advisories.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CANARY, _CANARY_VERSION = "jinja2", "2.11.2"
"""Has advisories since 2021."""
_NAMED = 10
"""Packages that could not be looked up are named up to this number."""


def audit(pip_audit: str, requirements: str, options: Sequence[str] = ()) -> int:
    """Print a line per advisory.

    Args:
        pip_audit: the program.
        requirements: a file with the version and the hashes of every package, their dependencies included.
        options: further ones of the program.

    Returns:
        0: no advisory. 1: advisories, or the audit could not be made.
    """
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary.txt"
        canary.write_text(f"{CANARY}=={_CANARY_VERSION}\n")
        try:
            if not any(_lines(package) for package in _report(pip_audit, canary, ["--no-deps", *options])):
                raise _NotMadeError(f"the service does not know the advisories of {CANARY} {_CANARY_VERSION}")
            packages = _report(pip_audit, Path(requirements), options)
        except _NotMadeError as error:
            print(f"make audit: not made: {error}", file=sys.stderr)
            return 1
    lines = [line for package in packages for line in _lines(package)]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if skipped:
        more = ", ..." if len(skipped) > _NAMED else ""
        lines.append(f"{len(skipped)} packages could not be looked up: {', '.join(skipped[:_NAMED])}{more}")
    found = sum(len(package.get("vulns", ())) for package in packages)
    print("\n".join([*lines, f"make audit: {len(packages) - len(skipped)} packages, {found} advisories"]))
    return 1 if found else 0


class _NotMadeError(Exception):
    """There is nothing to say about the packages."""


def _report(pip_audit: str, requirements: Path, options: Sequence[str]) -> list[dict[str, Any]]:
    """What the program found of each package.

    Raises:
        _NotMadeError: it has written nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [pip_audit, "--requirement", str(requirements), "--disable-pip", "--progress-spinner", "off"]
        done = subprocess.run(
            [*command, "--format", "json", "--output", str(report), *options],
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists() or not report.stat().st_size:
            raise _NotMadeError((done.stderr.strip().splitlines() or ["no output"])[-1])
        packages: list[dict[str, Any]] = json.loads(report.read_text())["dependencies"]
        return packages


def _lines(package: dict[str, Any]) -> list[str]:
    return [
        f"{package['name']} {package['version']}: {advisory['id']}; fixed in {', '.join(advisory['fix_versions'])}"
        for advisory in package.get("vulns", ())
    ]


if __name__ == "__main__":
    sys.exit(audit(sys.argv[1], sys.argv[2], sys.argv[3:]))
