"""A machine with the GPUs that a test needs, as far as `nvidia-smi` shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def machine_with(patch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Put a program `nvidia-smi` that lists GPUs with these names before the machine's own, and hide none of them."""
    rows = "".join(rf"{index}, {name}, 1, 1, 1, 1, 1, 0\n" for index, name in enumerate(names))
    indices = "".join(rf"{index}\n" for index in range(len(names)))
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncase $1 in *name*) printf '{rows}';; *) printf '{indices}';; esac\n")
    program.chmod(0o755)
    patch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
