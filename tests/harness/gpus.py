"""A machine with the GPUs that a test needs, as far as `nvidia-smi` shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def machine_with(patch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Put a program `nvidia-smi` that lists GPUs with these names before the machine's own, and hide none of them."""
    rows = "".join(rf"{index}, {name}, 143771, 4, 580.95.05\n" for index, name in enumerate(names))
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    program.chmod(0o755)
    patch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
