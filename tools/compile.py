"""Compiles the simulator, the policies and the performance model with mypyc, for this interpreter (`make compiled`).

    python -m tools.compile [--optimization 2]

The sources stay the only code: compiled and interpreted modules are built from the same files and give equal results.
The build lies in `build/compiled/`. It is used as long as the sources do not change (`ampd.compiled`); `ampd --version`
says whether it is. `make clean` removes it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ampd.compiled import FOLDER, HASHES_FILE, LIBRARY, ROOT, hash_of, source_of
from ampd.errors import UserError, guarded
from tools.compiled_sources import prepared

FOLDERS = (
    "planner/simulator",
    "ampd/serving",
    "ampd/policies/binding",
    "ampd/policies/ordering",
    "ampd/policies/routing",
    "ampd/policies/slicing",
)
"""All modules of these folders are compiled."""

MODULES = (
    "ampd.keys",
    "ampd.perf.corrections",
    "ampd.perf.model",
    "ampd.perf.piecewise",
    "ampd.policies.base",
    "ampd.policies.estimates",
    "ampd.policies.moore_hodgson",
    "ampd.telemetry.windows",
    "ampd.types",
)
"""Further modules that are compiled."""

PACKAGES = ("ampd", "planner", "workloads")
"""What the modules import from."""

_MYPY = """[mypy]
ignore_missing_imports = true
follow_imports = silent
"""


def main() -> int:
    """Build, and replace the build before."""
    parser = argparse.ArgumentParser(prog="tools.compile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--optimization", default="2", choices=("0", "1", "2", "3"), help="of the C compiler")
    given = parser.parse_args()
    return guarded(lambda: build(given.optimization))


def build(optimization: str) -> int:
    """Compile everything.

    Raises:
        UserError: something that a build needs is missing, or the build failed.
    """
    _check()
    names = modules()
    with tempfile.TemporaryDirectory(prefix="ampd-compiled-") as folder:
        copy = Path(folder)
        hashes = _write_copy(copy, names)
        paths = [f"{name.replace('.', '/')}.py" for name in names]
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "mypyc_setup.py"), LIBRARY, optimization, *paths],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            (ROOT / "build").mkdir(exist_ok=True)
            log = ROOT / "build" / "compiled.log"
            log.write_text(done.stdout + done.stderr)
            raise UserError(f"the build failed, see {log}; without it everything runs in pure Python")
        _put(copy, hashes)
    print(f"compiled {len(names)} modules into {FOLDER}")
    return 0


def modules() -> list[str]:
    """The modules that are compiled, sorted."""
    found = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for folder in FOLDERS
        for path in (ROOT / folder).glob("*.py")
        if path.name != "__init__.py"
    ]
    return sorted([*found, *MODULES])


def _check() -> None:
    """Say what a build lacks, before it takes minutes."""
    lacking = [name for name in ("mypyc", "setuptools") if importlib.util.find_spec(name) is None]
    if lacking:
        raise UserError(f"a build needs {' and '.join(lacking)}: make compiled, or uv pip install '.[compiled]'")
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        raise UserError("a build needs a C compiler: apt install gcc; without a build everything runs in pure Python")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise UserError("a build needs Python's headers: apt install python3-dev; without it all runs in pure Python")


def _write_copy(copy: Path, names: Sequence[str]) -> dict[str, str]:
    """Copy the packages, with prepared sources; returns the hashes of the originals."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "mypy.ini").write_text(_MYPY)
    hashes: dict[str, str] = {}
    for name in names:
        path = copy / source_of(name).relative_to(ROOT)
        hashes[name] = hash_of(path)
        path.write_text(prepared(path.read_text()))
    return hashes


def _put(copy: Path, hashes: Mapping[str, str]) -> None:
    """Replace the build before."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    (library,) = (copy / "lib").glob(f"{LIBRARY}*")
    shutil.copy2(library, FOLDER / f"{LIBRARY}{sysconfig.get_config_var('EXT_SUFFIX')}")
    # Last, because without it the folder is no build.
    (FOLDER / HASHES_FILE).write_text(json.dumps(hashes, indent=1))


if __name__ == "__main__":
    sys.exit(main())
