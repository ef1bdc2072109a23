"""`make` reports what a machine lacks before it downloads anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tools import install_check
from tools.install_check import main, problems

Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def free_gb(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Free space that is reported of every folder, in a machine that lacks nothing."""
    free = {"": 100.0}

    def disk_usage(folder: Path) -> Usage:
        assert folder.exists()
        return Usage(0, 0, max(size for name, size in free.items() if name in str(folder)) * 1e9)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return free


def test_this_machine_can_run_ampd(tmp_path: Path, free_gb: dict[str, float]) -> None:  # noqa: ARG001
    assert problems(tmp_path / ".venv", "[sglang]") == []


def test_sglang_needs_more_room_unless_it_is_there(tmp_path: Path, free_gb: dict[str, float]) -> None:
    free_gb[""] = 8.0
    assert problems(tmp_path / "venv", "") == []
    (line,) = problems(tmp_path / "venv", "[sglang,dev]")
    assert line.startswith(f"15 GB of free space are needed in {tmp_path}, and 8.0 GB are there; make room, or ")
    (tmp_path / "venv/lib/python3.11/site-packages/sglang").mkdir(parents=True)
    assert problems(tmp_path / "venv", "[sglang]") == []


def test_the_cache_of_packages_needs_room_too(
    tmp_path: Path, free_gb: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "small").mkdir()
    free_gb.update({"": 1.0, "large": 100.0})
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "small" / "uv"))
    (line,) = problems(tmp_path / "large" / "venv", "")
    assert f"needed in {tmp_path}/small, and 1.0 GB" in line


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 14, 0)])
def test_other_versions_of_python_are_refused(version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", version)
    assert "make PYTHON=python3.12" in problems(Path(".venv"), "")[0]


@pytest.mark.usefixtures("free_gb")
def test_each_lack_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert main(tmp_path / "venv", "") == 2
    lines = capfd.readouterr().err.splitlines()
    assert all(line.startswith("make: ") for line in lines)
    for line, part in zip(lines, ("apt install python3-venv", "x86_64 or aarch64", "redis-server"), strict=True):
        assert part in line


def programs(folder: Path, *names: str) -> str:
    """A PATH with these programs only."""
    folder.mkdir()
    for name in names:
        (folder / name).touch(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("present", "extras", "reports"),
    [
        (("nvidia-smi",), "[sglang]", True),
        (("nvidia-smi", "g++"), "[sglang]", False),
        (("nvidia-smi", "c++"), "[sglang,dev]", False),
        (("nvidia-smi",), "", False),
        ((), "[sglang]", False),
    ],
)
def test_a_gpu_without_a_compiler_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: tuple[str, ...], extras: str, reports: bool
) -> None:
    monkeypatch.setattr(install_check, "GPU_SIGNS", ())
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", *present))
    lines = [line for line in problems(tmp_path / "venv", extras) if "C++ compiler" in line]
    assert bool(lines) is reports
    assert all("apt install g++" in line for line in lines)


def test_the_headers_of_python_are_needed_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", "nvidia-smi", "g++"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert any("Python's headers" in line for line in problems(tmp_path / "venv", "[sglang]"))


def test_make_says_so_before_it_downloads_anything(tmp_path: Path) -> None:
    """`make` as a user types it, on a machine whose PATH has a GPU's tool and no compiler."""
    make, root = shutil.which("make"), Path(__file__).parents[2]
    if make is None:
        pytest.skip("make is not installed")
    environment = {"PATH": programs(tmp_path / "bin", "nvidia-smi"), "HOME": str(tmp_path)}
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    command = [make, "demo", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    assert done.returncode == 2
    assert "a C++ compiler" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_it_runs_without_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", install_check.__file__, str(tmp_path / "venv"), ""]
    assert subprocess.run(command, check=False, capture_output=True, cwd=tmp_path).returncode in (0, 2)
