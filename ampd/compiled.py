"""Imports compiled modules, where they were built from exactly these sources (docs/simulator.md).

`make compiled` compiles modules of this repository into a folder of their own, and notes the hashes of their sources.
A finder in front of Python's own gives out these modules if all hashes are those of the present sources. Otherwise it
gives out none of them, because modules that call each other must come from one build, and an old build must never run.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
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

VARIABLE = "AMPD_COMPILED"
"""Environment variable. Unset: commands that simulate use compiled modules. `1`: every process does, those of a graph
too. `0`: none does."""

ROOT = Path(__file__).resolve().parents[1]
"""The folder with the packages."""

FOLDER = ROOT / "build" / "compiled" / str(sysconfig.get_config_var("SOABI"))
"""The build for this interpreter."""

HASHES_FILE = "hashes.json"
"""Module -> SHA-256 of the source that it was compiled from; in the folder of a build."""

LIBRARY = "ampd_compiled__mypyc"
"""The extension module with the code of all compiled modules."""

_MODULE = re.compile(r"\w+(\.\w+)*", re.ASCII)


def install() -> None:
    """From now on, imports find compiled modules first."""
    if not _is_installed():
        sys.meta_path.insert(0, _Finder())


def _is_installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def source_of(module: str) -> Path:
    """The source of a module that can be compiled."""
    return ROOT / f"{module.replace('.', '/')}.py"


def hash_of(source: Path) -> str:
    """A source as the notes of a build name it; empty if there is none."""
    try:
        return sha256(source.read_bytes()).hexdigest()
    except OSError:
        return ""


@cache
def state() -> str:
    """`compiled`, or why this process runs in pure Python."""
    why = _why_not()
    return f"pure Python: {why}" if why else "compiled"


def in_use() -> str:
    """What this process runs, for its log: `compiled`, or `pure Python`, with a reason if it looked for a build."""
    return state() if _is_installed() else "pure Python"


def _why_not() -> str:
    """Why no compiled module is used; empty: they are used."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE} is 0"
    hashes = _hashes()
    if not hashes:
        return "not built (make compiled)"
    changed = [name for name, noted in hashes.items() if hash_of(source_of(name)) != noted]
    if changed:
        return f"{changed[0]} differs from what was built (make compiled)"
    early = sorted(hashes.keys() & sys.modules.keys())
    return f"{early[0]} was imported before" if early else ""


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
    if not isinstance(notes, dict):
        return {}
    is_sound = all(_MODULE.fullmatch(name) and noted and type(noted) is str for name, noted in notes.items())
    return notes if is_sound else {}


class _Finder:
    """Finds the modules of the build."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The compiled module; None: Python looks for its source."""
        path = str(FOLDER / f"{LIBRARY}{sysconfig.get_config_var('EXT_SUFFIX')}")
        if name == LIBRARY:
            return spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        if name not in _hashes() or state() != "compiled":
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
