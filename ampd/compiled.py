"""Imports compiled modules, where they were built from exactly these sources (docs/simulator.md).

`make compiled` compiles modules of this repository into a folder of their own, and notes the hashes of their sources.
A finder in front of Python's own gives out these modules if all hashes are those of the present sources. Otherwise it
gives out none of them, because modules that call each other must come from one build, and an old build must never run.
"""

from __future__ import annotations

import ctypes
import json
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
"""The folder with the packages."""

FOLDER = ROOT / "build" / "compiled" / str(sysconfig.get_config_var("SOABI"))
"""The build for this interpreter."""

HASHES_FILE = "hashes.json"
"""Module -> SHA-256 of the source that it was compiled from; in the folder of a build."""

LIBRARY = "ampd_compiled__mypyc"
"""The extension module with the code of all compiled modules."""


def install() -> None:
    """From now on, imports find compiled modules first, if there is a build of these sources."""
    if state() == "compiled":
        sys.meta_path.insert(0, _Finder())


def source_of(module: str) -> Path:
    """The source of a module that can be compiled."""
    return ROOT / f"{module.replace('.', '/')}.py"


def hash_of(source: Path) -> str:
    """A source as the notes of a build name it; empty if it cannot be read."""
    try:
        return sha256(source.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return ""


@cache
def state() -> str:
    """`compiled`, or why everything runs in pure Python, for `ampd --version` and for logs."""
    hashes = _hashes()
    if not hashes:
        return "pure Python: not built (make compiled)"
    changed = next((name for name, noted in hashes.items() if hash_of(source_of(name)) != noted), None)
    return f"pure Python: {changed} differs from what was built (make compiled)" if changed else "compiled"


@cache
def _hashes() -> dict[str, str]:
    """The notes of the build; nothing if there is no build."""
    return notes_in(FOLDER / HASHES_FILE)


def notes_in(path: Path) -> dict[str, str]:
    """Module -> hash of its source; nothing if the file is missing or unusable, as after a build that broke off."""
    try:
        notes = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}


class _Finder:
    """Finds the modules of the build."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The compiled module; None: Python looks for its source."""
        path = str(FOLDER / f"{LIBRARY}{sysconfig.get_config_var('EXT_SUFFIX')}")
        if name == LIBRARY:
            return spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        if name not in _hashes():
            return None
        return spec_from_file_location(name, path, loader=_Loader())


class _Loader(Loader):
    """Makes a module with the library's function for it.

    mypyc would have a small extension module built for each module, which does just this. Together they take longer to
    build than the library.
    """

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module, complete."""
        name = f"init_{spec.name.replace('.', '___')}"
        capsule = getattr(import_module(LIBRARY), name)
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.argtypes, pointer_of.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
        made: ModuleType = ctypes.PYFUNCTYPE(ctypes.py_object)(pointer_of(capsule, f"{LIBRARY}.{name}".encode()))()
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""
